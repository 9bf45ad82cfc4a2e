"""Several machines, as network namespaces of this one."""
