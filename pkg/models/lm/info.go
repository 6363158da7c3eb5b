package lm

import "github.com/meander-rl/meander/pkg/models/model"

// Info describes a model without loading it.
type Info struct {
	// Card is the card of the opened model, without the digest of the weights and the backend. Fields whose
	// configuration cannot be read are zero. CacheTokens is for a cache of the default size.
	Card
	// Parts is the network, if it could be read.
	Parts []model.PartInfo `json:"parts"`
	// Tokens is the number of tokens of the tokenizer, 0 if it cannot be read.
	Tokens int `json:"tokens"`
	// Template shows how the chat template writes a conversation; empty if it cannot be read.
	Template string `json:"template"`
	// CacheTokenBytes is the memory of a token in the cache, CacheBytes the default size of the cache.
	CacheTokenBytes int `json:"cache_token_bytes"`
	CacheBytes      int `json:"cache_bytes"`
	// Problems are the reasons why the model would not open; none means that it opens.
	Problems []string `json:"problems"`
}
