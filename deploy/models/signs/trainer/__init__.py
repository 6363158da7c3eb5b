"""How the signs checkpoint is made: images (render), parts (tokens, text, mmdit, vae), training (fit_*), folder
(export)."""
