package decoding

// Masked is how many logits are -Inf.
func (d *Distribution) Masked() int { return d.masked }

// Kept is how many tokens the filters keep.
func (d *Distribution) Kept() int { return d.count }
