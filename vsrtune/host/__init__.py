"""Wall: reading. One module per interface of the host: /proc, cgroups, network devices, route
netlink, libvirt, QMP, the scheduler; live or recorded."""
