"""A mixture of experts to build models from, and the losses of its routers."""
