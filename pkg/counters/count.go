package counters

import (
	"math"
	"slices"
	"strconv"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// count counts an event, whose outcome is said.
func (r *Run) count(m *bus.Message, a schemas.Address, outcome string) {
	mark := r.mark(m.Stream)
	mark.Seq, mark.Newest = m.Seq, max(mark.Newest, m.Time.UnixNano())
	mark.Events++
	mark.Bytes += m.StoredSize()
	r.changed = true
	if outcome != "" {
		i := slices.IndexFunc(r.Outcomes, func(o Outcome) bool { return o.Kind == a.Kind && o.Outcome == outcome })
		if i < 0 {
			i, r.Outcomes = len(r.Outcomes), append(r.Outcomes, Outcome{Kind: a.Kind, Outcome: outcome})
		}
		n := int64(1)
		if a.Kind == schemas.KindTrajectory { // samples are counted, not their stages
			n = m.Ends()
		}
		r.Outcomes[i].N += n
	}
	switch a.Kind {
	case schemas.KindTrajectory:
		if r.Lane == "" && outcome != "" {
			r.Lane = schemas.Lane(m.Header.Get(schemas.HeaderLane))
		}
	case schemas.KindAdvantage:
		if outcome == "" { // the true one will replace it
			break
		}
		mean, err := strconv.ParseFloat(m.Header.Get(schemas.HeaderMean), 64)
		if err == nil && !math.IsNaN(mean) && !math.IsInf(mean, 0) {
			r.Mean.Of, r.Mean.N = r.Mean.Of+mean, r.Mean.N+1
		}
		if r.Open[a.UID] {
			delete(r.Open, a.UID)
		} else {
			put(&r.Orphans, a.UID, true)
		}
	case schemas.KindGroup:
		r.Groups++
		delete(r.Letters, a.UID)
		if r.Orphans[a.UID] {
			delete(r.Orphans, a.UID)
		} else {
			put(&r.Open, a.UID, true)
		}
	case schemas.KindBatch:
		delete(r.Batches, a.Batch)
	case schemas.KindOpening:
		if a.Batch != string(a.UID) && !r.Batches[a.Batch] { // else the group is a batch by itself
			put(&r.openings, a.Batch, true)
		}
	case schemas.KindDead:
		if a.Service == schemas.ServiceIntake {
			r.letters = addTo(r.letters, a.UID, 1)
		}
	}
}
