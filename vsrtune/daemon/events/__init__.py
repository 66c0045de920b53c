"""Events that wake the daemon: libvirt, links, policy files, and settings read by polling."""
