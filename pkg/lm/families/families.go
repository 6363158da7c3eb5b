// Package families lists the families of language models of this project, for the programs
// that open models by name.
package families

import (
	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/lm/qwen2"
)

// All is every family, each a line. A program that knows more appends to it.
func All() lm.Registry {
	return lm.Registry{
		qwen2.Family(),
	}
}
