"""What wakes the daemon: libvirt, links, policy files, and settings that tell nobody."""
