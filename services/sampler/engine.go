package sampler

import (
	"context"
	"image"

	"github.com/meander-rl/meander/schemas"
)

// Engine makes rollouts: it knows a model and the mathematics of its samples, and nothing
// of where requests come from, where events go, or whose turn it is.
//
// The bits of an episode depend on its request, the weights and the build, never on the
// episodes that are stepped beside it.
type Engine interface {
	// Backend names what computes, for the record of events.
	Backend() string
	// Start makes an episode of a valid request: it checks what only the model can, encodes
	// the prompt and draws what the rollout begins with. from is where it begins instead: at the
	// request's start, or at a later step that an earlier attempt came to, with its states,
	// [n, S, C] or [1, S, C], to which noise is added where it has Data; nil where x_T is to be
	// drawn. A fault of the request is a bus.TerminalError. It may be called concurrently, also
	// with Step.
	Start(ctx context.Context, req *schemas.Request, from *schemas.SegmentStart) (Episode, error)
	// Step advances each episode, all of one bucket, by one boundary. An error is one of the
	// whole call; what is wrong with an episode alone is in its Take: one that fails, or has the model
	// panic, does so tried alone. One goroutine calls it for an episode.
	Step(ctx context.Context, episodes []Episode) error
}

// Episode is one rollout of an engine.
type Episode interface {
	// Bucket tells which episodes can be stepped together: those of equal buckets.
	Bucket() string
	// Take returns what the last Step completed, in order, none while a step needs more evaluations, as
	// events without the names of run, sample, attempt and process. An error ends the
	// episode.
	Take() ([]schemas.StepEvent, error)
	// Done says that all steps have been taken.
	Done() bool
	// Finish adds what only the engine knows to the trajectory of an episode that is done,
	// and returns its images, if any.
	Finish(ctx context.Context, t *schemas.Trajectory) (Images, error)
}

// Switcher is an episode that can go on with another engine of the same model, between two steps.
type Switcher interface{ Switch(to Engine) }

// Images are those of a trajectory, nil where it is not to have one: of what the sample ended
// with and, under scheduled sampling, of its noised and its teacher-forced latent.
type Images struct{ End, Noised, Teacher *image.NRGBA }
