package lm

import "github.com/meander-rl/meander/pkg/model"

// Info describes a model without loading it.
type Info struct {
	// Card is that of the opened model as far as it can be told: fields whose configuration cannot be read are zero, and there
	// is neither a digest of weights nor a backend. CacheTokens is what a cache of the default size holds.
	Card
	// Parts is the network, where it could be read.
	Parts []model.PartInfo
	// Tokens is how many the tokenizer knows, 0 where it cannot be read.
	Tokens int
	// Template says how conversations are written, for people; empty where it cannot be read.
	Template string
	// CacheTokenBytes is what a token takes in the cache, CacheBytes the size of the cache where nobody says another.
	CacheTokenBytes, CacheBytes int
	// Problems is everything for which the model would not open; none means that it opens.
	Problems []string
}
