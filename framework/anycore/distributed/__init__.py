"""Models on the nodes of a Ray cluster: fronts with this server's own application, and engines that Ray places."""
