"""`ampcompile.audit`: the errors of a mixed run against an exact one, op by op, and the modules to keep in float32."""
