package results

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Prompt is a prompt whose outcome is wanted.
type Prompt struct {
	UID  schemas.UID
	Text string
}

// Outcomes follows what becomes of the prompts of a run. A group may be given up and replaced by a fresh one; the
// outcome is that of the last.
type Outcomes struct {
	prompts    []Prompt
	advantages map[schemas.UID]*schemas.Advantage // by the uid of the prompt
	refused    map[schemas.UID]string             // reasons
	refilled   map[schemas.UID]bool               // uids of groups that a fresh one replaces
	open       map[schemas.UID]bool
}

// NewOutcomes returns Outcomes in which every prompt is still open, that is, without a result. The uids of the
// prompts must differ.
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

// Read adds every stored advantage of the run, before new ones are followed with Add. It fails if the server cannot
// be read.
func (o *Outcomes) Read(ctx context.Context, b *bus.Bus, run schemas.Run) error {
	stored, err := b.LastMany(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(run, "*")})
	if err != nil {
		return fmt.Errorf("read stored advantages: %w", err)
	}
	for _, m := range stored {
		o.Add(m)
	}
	return nil
}

// Add notes an advantage event, which closes the group of a prompt, or says that a fresh group replaces it. An event
// that is not valid, not of these prompts, or not new changes nothing.
func (o *Outcomes) Add(m *bus.Message) {
	var a schemas.Advantage
	if bus.Fits(m, &a) != nil {
		return // not a result; the true one will replace it
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

// Refuse notes that a prompt was refused; it changes nothing if the prompt has an outcome.
func (o *Outcomes) Refuse(uid schemas.UID, reason string) {
	if o.open[uid] {
		o.refused[uid] = reason
		delete(o.open, uid)
	}
}

// Open reports whether a prompt has no outcome yet.
func (o *Outcomes) Open(uid schemas.UID) bool { return o.open[uid] }

// Left returns how many prompts have no outcome yet.
func (o *Outcomes) Left() int { return len(o.open) }

// Refills returns how many groups were given up for fresh ones.
func (o *Outcomes) Refills() int { return len(o.refilled) }

// Advantage returns the result of a prompt's group, or of the last group that replaced it; nil if there is none.
func (o *Outcomes) Advantage(uid schemas.UID) *schemas.Advantage { return o.advantages[uid] }

// Refused reports whether a prompt was refused, and why.
func (o *Outcomes) Refused(uid schemas.UID) (reason string, refused bool) {
	reason, refused = o.refused[uid]
	return reason, refused
}
