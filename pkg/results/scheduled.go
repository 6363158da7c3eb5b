package results

import (
	"context"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/sheet"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// rollSums gathers the metrics of scheduled sampling over a run.
type rollSums struct {
	samples, rolled, drifts, terms float64
	sums                           map[string]float64
	weights                        [2]float64
	probability, plans             float64
}

// add adds a sample's roll to the sums of the run; nil, for a sample that is not of scheduled sampling, adds nothing.
func (x *rollSums) add(r *view.Roll) {
	if r == nil {
		return
	}
	if x.sums == nil {
		x.sums = map[string]float64{}
	}
	x.samples++
	if r.Reason == "" {
		x.rolled++
		if r.Drift != nil {
			x.drifts++
			x.sums["drift"] += *r.Drift
		}
	}
	x.sums["offset"] += float64(r.Offset)
	x.sums["most"] = max(x.sums["most"], float64(r.Offset))
	x.sums["forwards"] += float64(r.Forwards)
	if t := r.Terms; t != nil {
		if x.terms++; x.terms == 1 {
			x.weights = [2]float64{t.WeightMin, t.WeightMax}
		}
		x.weights = [2]float64{min(x.weights[0], t.WeightMin), max(x.weights[1], t.WeightMax)}
		x.sums["exposure"] += t.ExposureL1
		x.sums["fc"] += t.FCLoss
		x.sums["adr"] += t.ADRLoss
	}
}

// metrics adds the metrics of scheduled sampling to m, as far as samples have them; without such samples it adds none.
func (x *rollSums) metrics(m map[string]float64) {
	if x.samples == 0 {
		return
	}
	m["scheduled_sampling/rolled_fraction"] = x.rolled / x.samples
	m["scheduled_sampling/offset_mean"] = x.sums["offset"] / x.samples
	m["scheduled_sampling/offset_max"] = x.sums["most"]
	m["scheduled_sampling/extra_forwards"] = x.sums["forwards"]
	if x.plans > 0 {
		m["scheduled_sampling/probability"] = x.probability / x.plans
	}
	if x.drifts > 0 {
		m["scheduled_sampling/drift_l2"] = x.sums["drift"] / x.drifts
	}
	if x.terms > 0 {
		m["reflexflow/exposure_l1"] = x.sums["exposure"] / x.terms
		m["reflexflow/fc_loss"], m["reflexflow/adr_loss"] = x.sums["fc"]/x.terms, x.sums["adr"]/x.terms
		m["reflexflow/weight_min"], m["reflexflow/weight_max"] = x.weights[0], x.weights[1]
	}
}

// Plans returns the stored plans of a run's groups of scheduled sampling, by uid. It fails if the server cannot be
// read.
func Plans(ctx context.Context, b *bus.Bus, run schemas.Run) (map[schemas.UID]*schemas.Plan, error) {
	stored, err := b.LastMany(ctx, schemas.StreamGroups, []string{schemas.PlanSubject(run, "*")})
	if err != nil {
		return nil, fmt.Errorf("read plans: %w", err)
	}
	plans := map[schemas.UID]*schemas.Plan{}
	for _, m := range stored {
		p := &schemas.Plan{}
		if bus.Fits(m, p) == nil {
			plans[p.UID] = p
		}
	}
	return plans, nil
}

// drawRolledSheet draws a PNG of what scheduled sampling did to each sample of a group: its images beside each other,
// and their difference. nil: no sample has images. It fails if an image cannot be read.
func (g *Group) drawRolledSheet(ctx context.Context, b *bus.Bus) ([]byte, error) {
	var strips []sheet.Strip
	var pairs [][2]media.Media
	for _, m := range g.Members {
		t := m.Trajectory()
		if m.Roll == nil || t.Medium(schemas.KindImage) == nil {
			continue
		}
		strip := sheet.Strip{Lines: sheetLines(m.Roll, m.SampleIndex), Media: make([]media.Media, 5)}
		original := (*schemas.Medium)(nil)
		if t.Start != nil && t.Start.Data != nil && t.Start.Data.Image != nil {
			original = &schemas.Medium{Ref: t.Start.Data.Image}
		}
		for k, im := range []*schemas.Medium{original, t.Rolled.Noised, t.Medium(schemas.KindImage), t.Rolled.Teacher} {
			var size media.Size // of any image
			if k == 0 {
				size = media.Size{Frames: int(max(1, t.Frames)), Height: int(t.Height), Width: int(t.Width)}
			}
			var err error
			if strip.Media[k], err = fetchImage(ctx, b, im, size); err != nil {
				return nil, fmt.Errorf("image of %s sample %d: %w", g.UID, m.SampleIndex, err)
			}
		}
		strips, pairs = append(strips, strip), append(pairs, [2]media.Media{strip.Media[2], strip.Media[3]})
	}
	if len(strips) == 0 {
		return nil, nil
	}
	off, gain := sheet.Differences(pairs)
	for i := range strips {
		strips[i].Media[4] = off[i]
	}
	s := &g.Members[0].Trajectory().ScheduledSampling.RollSettings
	title := fmt.Sprintf("%s  (%s, order %d, %d timesteps)", g.Prompt, s.Sampler, s.Order, s.Timesteps)
	return sheet.DrawStrips(title,
		[]string{"original", "noised", "rolled", "teacher-forced", fmt.Sprintf("difference x %d", gain)}, strips)
}

// sheetLines returns the lines of text that drawRolledSheet writes beside a sample.
func sheetLines(r *view.Roll, index int64) []string {
	if r.Reason != "" {
		return []string{fmt.Sprintf("#%d  timestep %g", index, r.Timestep), "did not roll: " + r.Reason}
	}
	return []string{
		fmt.Sprintf("#%d  %d to %g", index, r.Source, r.Timestep),
		fmt.Sprintf("%d noisier, noise %.3f", r.Steps(), r.U),
		"drift " + Number(r.Drift, "%.4f"),
	}
}

// fetchImage fetches and decodes media of a trajectory, of that size, and returns the frame in the middle; size is zero
// for an image of any. It is empty, without an error, if im is nil or no longer stored.
func fetchImage(ctx context.Context, b *bus.Bus, im *schemas.Medium, size media.Size) (m media.Media, err error) {
	if im == nil {
		return m, nil
	}
	data := im.Data
	if im.Ref != nil {
		data, err = b.GetBlob(ctx, *im.Ref)
		if errors.Is(err, bus.ErrNotFound) {
			return m, nil
		}
		if err != nil {
			return m, err
		}
	}
	m, err = media.Decode(data, size)
	return m.Middle(), err
}
