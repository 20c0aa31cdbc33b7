"""`ampcompile.audit`: how far a mixed run is from an exact one, op by op, and which modules to keep in float32."""
