"""The op sweep: each operator of torch's own database, by amp, by eager autocast, by stock AOTAutograd, in float64."""
