"""The lab: real KVM hosts with libvirt routers, emulated, one per run."""
