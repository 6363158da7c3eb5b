package results

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Prompt is one whose outcome is wanted.
type Prompt struct {
	UID  schemas.UID
	Text string
}

// Outcomes is what has become of the prompts of a run. A group may be given up for a fresh one
// that stands in for it: the outcome is that of the last.
type Outcomes struct {
	prompts    []Prompt
	advantages map[schemas.UID]*schemas.Advantage // by the uid of the prompt
	refused    map[schemas.UID]string             // reasons
	refilled   map[schemas.UID]bool               // uids of groups that another stands in for
	open       map[schemas.UID]bool
}

// NewOutcomes knows of no outcome yet. The uids differ.
func NewOutcomes(prompts []Prompt) *Outcomes {
	o := &Outcomes{
		prompts: prompts, advantages: map[schemas.UID]*schemas.Advantage{}, refused: map[schemas.UID]string{},
		refilled: map[schemas.UID]bool{}, open: map[schemas.UID]bool{},
	}
	for _, p := range prompts {
		o.open[p.UID] = true
	}
	return o
}

// Read takes every advantage of the run that is stored.
func (o *Outcomes) Read(ctx context.Context, b *bus.Bus, run schemas.Run) error {
	stored, err := b.LastMany(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(run, "*")})
	if err != nil {
		return fmt.Errorf("read stored advantages: %w", err)
	}
	for _, m := range stored {
		o.Take(m)
	}
	return nil
}

// Take takes an advantage event. What is none, of no prompt here, or has come before changes
// nothing.
func (o *Outcomes) Take(m *bus.Message) {
	var a schemas.Advantage
	if bus.Fits(m, &a) != nil {
		return // the group's result will take its place
	}
	uid := a.UID
	if a.Refill != nil {
		uid = a.Refill.Root
	}
	switch {
	case !o.open[uid]:
	case a.RefilledBy != "": // a fresh group is on its way
		o.refilled[a.UID] = true
	case a.Status == schemas.StatusRefused:
		o.Refuse(uid, a.Error)
	default:
		o.advantages[uid] = &a
		delete(o.open, uid)
	}
}

// Refuse takes it that a prompt was refused.
func (o *Outcomes) Refuse(uid schemas.UID, reason string) {
	if o.open[uid] {
		o.refused[uid] = reason
		delete(o.open, uid)
	}
}

// Open says whether a prompt has no outcome yet.
func (o *Outcomes) Open(uid schemas.UID) bool { return o.open[uid] }

// Left is how many prompts have no outcome yet.
func (o *Outcomes) Left() int { return len(o.open) }

// Refills is how many groups were given up for fresh ones.
func (o *Outcomes) Refills() int { return len(o.refilled) }

// Advantage is the result of a prompt's group, or of the last that stood in for it; nil: none.
func (o *Outcomes) Advantage(uid schemas.UID) *schemas.Advantage { return o.advantages[uid] }

// Refused says whether and why a prompt was refused.
func (o *Outcomes) Refused(uid schemas.UID) (reason string, refused bool) {
	reason, refused = o.refused[uid]
	return reason, refused
}
