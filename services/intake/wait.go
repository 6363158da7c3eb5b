package intake

import (
	"fmt"

	"github.com/meander-rl/meander/schemas"
)

// need is a kind of thing that prompts wait for.
type need struct {
	// code is that of the refusal of a prompt that has waited for cfg.Hold.
	code string
	// expected says that it is no alarm: another does it in its own time.
	expected bool
	// renewed says that cfg.Hold begins anew with each version of the lane.
	renewed bool
	// elsewhere says that other processes serve the prompt: it is put back to them.
	elsewhere bool
}

// What prompts wait for: a sampler, reward services, space for their steps, weights that a trainer pushes, and another
// pipeline.
var (
	forModel   = need{code: schemas.CodeUnknownModel}
	forReward  = need{code: schemas.CodeUnknownReward}
	forSpace   = need{code: schemas.CodeExhausted}
	forVersion = need{code: schemas.CodeExhausted, expected: true, renewed: true}
	forOther   = need{code: schemas.CodeUnknownModel, expected: true, elsewhere: true}
)

// wait is what a prompt waits for, in words; "": nothing.
type wait struct {
	need
	says string
}

// waits formats what a prompt waits for.
func (n need) waits(format string, args ...any) wait { return wait{n, fmt.Sprintf(format, args...)} }
