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

// checkLimits refuses a group that exceeds the limit of a stream by itself, or with the others of its batch, each as
// large as it: it could never end. It also refuses a group of a paused run if its requests cannot be parked: waiting
// for that would keep out the prompts of other runs. Refusals are terminal errors with the setting to change.
func (s *service) checkLimits(ctx context.Context, run schemas.Run, a *asked) error {
	first := a.requests[0]
	data, err := schemas.Encode(first)
	if err != nil {
		return err
	}
	request := int64(len(data)) + messageBytes
	for _, of := range leastSizes(a, request) {
		info, err := s.bus.StreamInfo(ctx, of.stream)
		if err != nil {
			return err
		}
		if err := of.check(first, info.Config.MaxBytes); err != nil {
			return bus.Terminal(schemas.CodeInvalid, err)
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
		free < request*int64(len(a.requests)) {
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
// they hold, the flag that raises the stream's limit, and what else would help. most is what surely is enough.
type leastSize struct {
	stream, what, flag, fix string
	bytes, most             int64
}

// check returns the fault of a group that takes more than the limit of the stream, by itself or in its batch; nil if it
// fits. Retention frees no open batch, so all groups of it must fit at once.
func (of leastSize) check(r *schemas.Request, limit int64) error {
	groups := max(1, r.Group.BatchGroups)
	if of.stream == schemas.StreamRequests { // which samplers empty meanwhile
		groups = 1
	}
	if limit <= 0 || of.bytes <= limit/groups {
		return nil
	}
	field, unit, size := "group_size", "group", r.GroupSize
	if of.bytes <= limit {
		field, unit, size = "batch.groups", "batch", groups
		of.what += fmt.Sprintf(", %s a group,", mib(of.bytes))
		of.fix += ", or the batch: each group of it may take a part of the limit"
	} else {
		groups = 1
	}
	return fmt.Errorf("%s: %d; its %s take about %s, and %s may hold %s, so that the %s could never end; give it more "+
		"with 'meander streams limit --%s %s', or %s", field, size, of.what, mib(groups*of.bytes), of.stream,
		mib(limit), unit, of.flag, wholeMiB(groups*of.most), of.fix)
}

// leastSizes returns the least that a group takes in each stream that must hold all of it at once. request is the
// size of one request in bytes. Images are left out: their compressed size is not known.
func leastSizes(a *asked, request int64) []leastSize {
	first, sizes := a.requests[0], a.sizes()
	n := first.GroupSize
	steps, largest := int64(0), int64(0)
	for _, bytes := range sizes {
		steps, largest = steps+bytes, max(largest, bytes)
	}
	bound := steps
	// The last one begins when its bound fits beside what the others have stored.
	steps = (steps-largest)/boundOver*boundUnder + largest
	group, err := schemas.Encode(&schemas.Opening{Run: first.Run, UID: first.UID, GroupSize: n, Group: first.Group})
	if err != nil {
		group = nil // counts as empty
	}
	reward := int64(len(group)) + messageBytes + scoreBytes*int64(len(first.Group.Reward))
	trajectories := int64(len(sizes)) * (messageBytes + int64(len(first.Prompt)+len(first.Prompt2)+len(first.Prompt3)))
	smaller := "make the group smaller"
	return []leastSize{
		{
			schemas.StreamSteps, "steps", "max-steps-bytes",
			"keep fewer states (rollout.return_step_indices), or " + smaller, steps, bound,
		},
		{
			schemas.StreamRequests, "requests, one by one,", "max-requests-bytes",
			"shorten the prompt and its metadata", request, request,
		},
		{
			schemas.StreamTrajectories, "trajectories", "max-trajectories-bytes", smaller,
			trajectories, trajectories * 2,
		},
		{
			schemas.StreamRewards, "rewards", "max-rewards-bytes", "shorten the metadata, or " + smaller,
			(n + 1) * reward, (n + 1) * reward * 2,
		},
	}
}

func mib(bytes int64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

// wholeMiB returns a size for a limit, rounded up.
func wholeMiB(bytes int64) string { return fmt.Sprintf("%dMiB", (bytes+1<<20-1)>>20) }
