package view

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// Waiting is a verdict that a finished sample waits for.
type Waiting struct {
	UID         schemas.UID `json:"uid"`
	SampleIndex int64       `json:"sample_index"`
	Name        string      `json:"name"`
	Prompt      string      `json:"prompt"`
	// Deadline is when the group closes without the verdict, Unix nanoseconds; 0: the service decides.
	Deadline int64 `json:"deadline"`
	// Image and Audio are the names of the files that a command wrote.
	Image string `json:"image,omitempty"`
	Audio string `json:"audio,omitempty"`

	Trajectory *schemas.Trajectory `json:"-"`
}

// VerdictNames returns the names of the verdicts, rewards from outside, that the samples of a group need.
func VerdictNames(g *schemas.Group) []string {
	var names []string
	for _, r := range g.Reward {
		if name := scorer.VerdictName(r.Name); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// ClosedAs returns the status of the result of a verdict's group if the verdict would come too late for it. It returns
// "" if the group is open, or has the verdict already: the same once more changes nothing. It fails if the server
// cannot be read.
func ClosedAs(ctx context.Context, b *bus.Bus, v *schemas.Verdict) (status string, err error) {
	closed, err := closedGroups(ctx, b, v.Run, v.UID)
	if err != nil || closed[v.UID] == "" {
		return "", err
	}
	if given, err := hasVerdict(ctx, b, v.Subject()); err != nil || given {
		return "", err
	}
	return closed[v.UID], nil
}

// closedGroups returns the statuses of the closed groups of a run, or of one group of it (uid "*": all).
func closedGroups(
	ctx context.Context, b *bus.Bus, run schemas.Run, uid schemas.UID,
) (map[schemas.UID]string, error) {
	stored, err := b.LastMany(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(run, uid)})
	if err != nil {
		return nil, fmt.Errorf("read results: %w", err)
	}
	out := map[schemas.UID]string{}
	for _, m := range stored {
		var a schemas.Advantage
		if bus.Fits(m, &a) == nil { // else the true one will replace it
			out[a.UID] = a.Status
		}
	}
	return out, nil
}

// hasVerdict reports whether a verdict is stored on a subject.
func hasVerdict(ctx context.Context, b *bus.Bus, subject string) (bool, error) {
	m, err := b.Last(ctx, schemas.StreamVerdicts, subject)
	if errors.Is(err, bus.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up verdict: %w", err)
	}
	return bus.Fits(m, &schemas.Verdict{}) == nil, nil
}

// WaitingForVerdicts returns the verdicts that finished samples of the open groups (uid "*": of all, else of one) of a
// run still wait for, sorted by uid, sample and name. It fails if the server cannot be read.
func WaitingForVerdicts(ctx context.Context, b *bus.Bus, run schemas.Run, uid schemas.UID) ([]Waiting, error) {
	rewards, err := Rewards(ctx, b, run, uid)
	if err != nil {
		return nil, err
	}
	closed, err := closedGroups(ctx, b, run, uid)
	if err != nil {
		return nil, err
	}
	made := Made{}
	for t, err := range Trajectories(ctx, b, run, uid) {
		if err != nil {
			return nil, err
		}
		if closed[t.UID] == "" && len(VerdictNames(&t.Group)) > 0 {
			made.Add(t.Trajectory)
		}
	}
	var waiting []Waiting
	for uid, index := range made.Samples() {
		of, ended := made.Of(uid, index)
		stands := Standing(of)
		if !ended || stands.StopReason != schemas.StopCompleted || rewards[Key{uid, index}] != nil {
			continue
		}
		for _, r := range stands.Group.Reward {
			name := scorer.VerdictName(r.Name)
			if name == "" {
				continue
			}
			given, err := hasVerdict(ctx, b, schemas.VerdictSubject(run, uid, index, name))
			if err != nil {
				return nil, err
			}
			if given {
				continue
			}
			t := cmp.Or(stages.Judged(&stands.Group, &r, of), stands)
			waiting = append(waiting, Waiting{
				UID: uid, SampleIndex: index, Name: name, Prompt: t.Prompt, Deadline: t.Group.Deadline, Trajectory: t,
			})
		}
	}
	slices.SortFunc(waiting, func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.SampleIndex, b.SampleIndex), cmp.Compare(a.Name, b.Name))
	})
	return waiting, nil
}

// Judged is a sample that waits for a verdict, with what a person judges.
type Judged struct {
	Waiting
	Line  *Line  `json:"line"`
	Text  *Text  `json:"text,omitempty"` // the whole conversation
	Truth string `json:"ground_truth,omitempty"`
}

// Unjudged returns samples of a run that wait for a verdict, those of the oldest groups first, at most most.
func (r *Reader) Unjudged(ctx context.Context, run schemas.Run, most int) ([]Judged, error) {
	f, err := r.follow(ctx, run, nil)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	var uids []schemas.UID
	for _, row := range f.order {
		if row.verdicts && row.Status == outcomes.Open && row.Made > row.Scored {
			uids = append(uids, row.UID)
		}
	}
	f.mu.Unlock()
	list := []Judged{}
	for _, uid := range uids {
		waiting, err := WaitingForVerdicts(ctx, r.bus, run, uid)
		if err != nil {
			return nil, err
		}
		for _, w := range waiting {
			t := w.Trajectory
			line := (&stored{trajectory: t}).line(w.SampleIndex)
			x := Judged{Waiting: w, Line: line, Truth: t.Group.GroundTruth().Text()}
			if t.Text != nil {
				x.Text = dropTensors(TextOf(t))
			}
			list = append(list, x)
		}
		if len(list) >= most {
			break
		}
	}
	return list[:min(len(list), most)], nil
}
