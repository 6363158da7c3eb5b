"""How the signs checkpoint is made: pictures (render), parts (tokens, text, mmdit, vae), training (fit_*), folder (export)."""
