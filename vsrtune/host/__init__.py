"""Wall: reading. One interface of the host each: /proc, cgroups, network devices, route netlink,
libvirt, QMP, the scheduler; live or recorded."""
