// Package families lists the families of language models of this project, for the programs
// that open models by name.
package families

import (
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
)

// All returns every family of this project, one per line. A program with more families appends them.
func All() lm.Registry {
	return lm.Registry{
		qwen2.Family(),
	}
}
