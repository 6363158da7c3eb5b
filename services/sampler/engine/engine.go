// Package engine says what a sampler needs of whatever makes its samples. A Network is an open model. Its Engine makes
// rollouts, each of which is an Episode: the scheduler steps many episodes in one call. A Change is what a policy
// changes in the checkpoint. What only some networks can is in their Abilities; what only some episodes can are
// interfaces of their own (Switcher, Talker, Texter, Predictor). There is one package for each kind of sample: images
// and texts.
package engine

import (
	"context"
	"errors"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
)

// Network is an open model. Values can be compared: With returns the network itself where nothing changes.
type Network interface {
	// Name is the model's name, and that of its lane unless another is set.
	Name() string
	// Backend names what computes, for the record of events.
	Backend() string
	// Digest names the weights.
	Digest() string
	// Policy is what a sampler of the model announces, in the lane of the model's name.
	Policy() *schemas.Policy
	// Engine makes samples. Workers call it at once.
	Engine(o Options) Engine
	// With returns the network with a change, or itself; the caller closes both. An error that stays is a *Refusal. ctx
	// bounds what is asked of a server, not the network that is returned.
	With(ctx context.Context, c Change) (Network, error)
	// Canary returns what the weights give for a fixed input; nil where a server has weights that never change.
	Canary(ctx context.Context) (*schemas.Canary, error)
	// Abilities say what the network can besides.
	Abilities() Abilities
	// Close closes the model.
	Close() error
}

// Options say how an engine is used.
type Options struct {
	// Workers is how many goroutines call Step at once.
	Workers int
	// Blobs loads the files that a request names; nil: such a request is refused.
	Blobs func(ctx context.Context, ref schemas.Ref) ([]byte, error)
	// SharePrefixes has samples of one prompt share the evaluation of the prompt. Bits do not depend on it.
	SharePrefixes bool
}

// Abilities are what some networks can. What is not set, a network cannot.
type Abilities struct {
	// Modules lists what adapters can change, Tensors what full weights replace.
	Modules lora.Table
	Tensors lora.Shapes
	// Servers draw the samples.
	Servers Servers
	// Concurrency is how many samples servers draw beside each other at most; 0: the sampler computes batches.
	Concurrency int
	// Away says why another process, which computes or draws, cannot be reached now.
	Away func() error
	// Notes are settings of the model's folder that are not followed, for people.
	Notes []string
	// Fault says why no request can be made for the model.
	Fault error
	// Describe adds to a trajectory what is known of it before any step ran.
	Describe func(t *schemas.Trajectory)
	// StateShape is [S, C] of the states that a request's samples may go on from; nil where they cannot.
	StateShape func(r *schemas.Request) ([]int64, error)
	// Encoder encodes the images that samples begin with.
	Encoder Encoder
}

// Encoder is a model that encodes images.
type Encoder interface {
	Card() model.Card
	EncodeMedia(ctx context.Context, m media.Media) ([]float32, error)
}

// ErrAway says that the server that draws the samples cannot be reached. The request is put back.
var ErrAway = errors.New("the engine takes no requests")

// Engine makes rollouts: it knows a model and the mathematics of its samples, not where requests come from, where
// events go, or whose turn it is. The bits of an episode depend on its request, the weights and the build, never on the
// episodes that are stepped beside it.
type Engine interface {
	// Backend names what computes, for the record of events.
	Backend() string
	// Start makes an episode of a valid request: it checks what only the model can, and encodes the prompt. The rollout
	// begins with x_T, or with from: at the request's start, or a later step of an earlier attempt, with states [n, S,
	// C] or [1, S, C], to which noise is added where from has Data. A fault of the request is a bus.TerminalError. It
	// may be called concurrently, also with Step.
	Start(ctx context.Context, req *schemas.Request, from *schemas.SegmentStart) (Episode, error)
	// Step advances each episode, all of the bucket of one of the engine's, by one boundary. An error is one of the
	// whole call; the fault of a single episode, which was then tried alone, is for its Take. One goroutine at a time
	// calls it for an episode.
	Step(ctx context.Context, episodes []Episode) error
}

// Episode is one rollout of an engine. One that is an io.Closer is closed when the attempt at its sample ends.
type Episode interface {
	// Bucket tells which episodes can be stepped together, by the engine of any: those of equal buckets.
	Bucket() any
	// Take returns what the last Step completed, in order, as events without the names of run, sample, attempt and
	// process; none while a step needs more evaluations. An error ends the episode.
	Take() ([]schemas.StepEvent, error)
	// Done reports whether all steps are made and their events taken.
	Done() bool
	// Finish adds what only the engine knows to the trajectory, and returns its images, if any.
	Finish(ctx context.Context, t *schemas.Trajectory) (Images, error)
}

// Switcher is an episode that can go on with another engine of the same model between two steps: with newer weights.
type Switcher interface{ Switch(to Engine) }

// Predictor is an episode that says in the middle what its sample would end with: the latents F32 [S, C] if the
// velocity at the beginning of the last step that Take returned held until sigma 0, decoded if asked. It adds to the
// trajectory what Finish does. It is asked before the next Step.
type Predictor interface {
	Predict(ctx context.Context, t *schemas.Trajectory, decode bool) (media.Media, schemas.Tensor, error)
}

// Seer is an engine that says what its network takes the state of a sample before step i for: an image, as a PNG. One
// goroutine at a time may ask.
type Seer interface {
	Seen(ctx context.Context, t *schemas.Trajectory, i int64, state []float32) ([]byte, error)
}

// Talker is an episode of a conversation. At the end of each answer it cannot be stepped until the interaction, a
// worker outside of the sampler, has replied. The sampler calls Asks, Rest and then Told.
type Talker interface {
	// Asks returns the question for the interaction, without names; nil while the episode can be stepped.
	Asks() *schemas.InteractRequest
	// Rest lets the engine free the episode's memory until Told.
	Rest()
	// Told gives the interaction's reply to the episode. It may evaluate the model.
	Told(ctx context.Context, reply *schemas.InteractReply) error
}

// Asks returns the question that an episode waits for; nil when it can be stepped.
func Asks(e Episode) *schemas.InteractRequest {
	if t, ok := e.(Talker); ok {
		return t.Asks()
	}
	return nil
}

// Texter is an episode whose encoded texts can be stored.
type Texter interface {
	// Texts returns the card of the model and the encoded texts; negative is nil without guidance.
	Texts() (card model.Card, cond, negative *model.Conditioning)
}

// Images are the images of a trajectory: of the end state and, under scheduled sampling, of the noised and the
// teacher-forced latent. Those that were not asked for are empty.
type Images struct{ End, Noised, Teacher media.Media }
