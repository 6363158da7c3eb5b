package intake

import (
	"context"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	// messageBytes is what a message takes in a stream besides its data: subject, headers and the server's own part.
	messageBytes = 300
	// scoreBytes is the least that a score takes in a reward event.
	scoreBytes = 60
	// Request.StepBytes is at most a fifth more than the steps really take.
	boundOver, boundUnder = 6, 5
)

// checkLimits refuses a group that exceeds the limit of a stream by itself: it could never end. It also refuses a
// group of a paused run if its requests cannot be parked: waiting for that would keep out the prompts of other runs.
// Refusals are terminal errors with the setting to change.
func (s *service) checkLimits(
	ctx context.Context, run schemas.Run, requests []*schemas.Request, policy *schemas.Policy,
) error {
	first := requests[0]
	data, err := schemas.Encode(first)
	if err != nil {
		return err
	}
	request := int64(len(data)) + messageBytes
	for _, of := range leastSizes(requests, policy, request) {
		info, err := s.bus.StreamInfo(ctx, of.stream)
		if err != nil {
			return err
		}
		if limit := info.Config.MaxBytes; limit > 0 && of.bytes > limit {
			return bus.Terminal(schemas.CodeInvalid, fmt.Errorf(
				"group_size: %d; its %s take about %s, and %s may hold %s, so that the group could never end; give "+
					"it more with 'meander streams limit --%s SIZE', or %s",
				len(requests), of.what, mib(of.bytes), of.stream, mib(limit), of.flag, of.fix))
		}
	}
	switch h, err := s.bus.ControlsOf(ctx, run, first.UID); {
	case err != nil:
		return err
	case h.Paused() == nil:
		return nil
	}
	info, err := s.bus.StreamInfo(ctx, schemas.StreamParked)
	if err != nil {
		return err
	}
	if free := info.Config.MaxBytes - int64(info.State.Bytes); info.Config.MaxBytes > 0 &&
		free < request*int64(len(requests)) {
		return parkingFull(run)
	}
	return nil
}

// parkingFull returns the terminal error of a prompt whose run is paused while the stream of parked requests is full.
func parkingFull(run schemas.Run) error {
	return bus.Terminal(schemas.CodeExhausted, fmt.Errorf(
		"run %s is paused, and %s has no space for more of its requests; publish the prompt again when the run goes "+
			"on ('meander resume %s'), or give the stream more with 'meander streams limit --max-parked-bytes SIZE'",
		run, schemas.StreamParked, run))
}

// explainFull replaces the error of a full stream by parkingFull; other errors stay as they are.
func explainFull(run schemas.Run, err error) error {
	if errors.Is(err, bus.ErrStreamFull) {
		return parkingFull(run)
	}
	return err
}

// leastSize is the least number of bytes that a group takes in a stream, with words for the message to the client: what
// they hold, the flag that raises the stream's limit, and what else would help.
type leastSize struct {
	stream, what, flag, fix string
	bytes                   int64
}

// leastSizes returns the least that a group takes in each stream that must hold all of it at once. request is the
// size of one request in bytes. Images are left out: their compressed size is not known.
func leastSizes(requests []*schemas.Request, policy *schemas.Policy, request int64) []leastSize {
	first, n := requests[0], int64(len(requests))
	steps, largest := int64(0), int64(0)
	for _, r := range requests {
		bytes := r.StepBytes(policy)
		steps, largest = steps+bytes, max(largest, bytes)
	}
	// The last one begins when its bound fits beside what the others have stored.
	steps = (steps-largest)/boundOver*boundUnder + largest
	group, err := schemas.Encode(&schemas.Opening{Run: first.Run, UID: first.UID, GroupSize: n, Group: first.Group})
	if err != nil {
		group = nil // counts as empty
	}
	reward := int64(len(group)) + messageBytes + scoreBytes*int64(len(first.Group.Reward))
	smaller := "make the group smaller"
	return []leastSize{
		{
			schemas.StreamSteps, "steps", "max-steps-bytes",
			"keep fewer states (rollout.return_step_indices), or " + smaller, steps,
		},
		{
			schemas.StreamRequests, "requests, one by one,", "max-requests-bytes",
			"shorten the prompt and its metadata", request,
		},
		{
			schemas.StreamTrajectories, "trajectories", "max-trajectories-bytes", smaller,
			n * (messageBytes + int64(len(first.Prompt)+len(first.Prompt2)+len(first.Prompt3))),
		},
		{
			schemas.StreamRewards, "rewards", "max-rewards-bytes", "shorten the metadata, or " + smaller,
			(n + 1) * reward,
		},
	}
}

func mib(bytes int64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }
