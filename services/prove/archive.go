package prove

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// archive is what the walk needs of the events of an archive.
type archive struct {
	run          schemas.Run
	updates      []*schemas.Update
	policies     []*schemas.Policy
	blobs        map[string][]byte // those of the adapters, by digest
	batches      map[string]*schemas.Batch
	records      map[schemas.UID]*schemas.GroupRecord
	openings     map[schemas.UID]*schemas.Opening
	advantages   map[schemas.UID]*schemas.Advantage
	trajectories map[uint64]*schemas.Trajectory // by sequence
	rewards      map[schemas.UID][]*schemas.Reward
	ratings      map[schemas.UID][]*schemas.Rating
	stepRewards  map[schemas.UID][]*schemas.StepReward
	selections   map[schemas.UID][]*schemas.Selection
	prompts      map[uint64]prompt // by sequence
}

// prompt is one as it was stored.
type prompt struct {
	*schemas.Prompt
	stored time.Time
}

// readArchive checks every byte of the archive and keeps its events. It reports whether the walk may go on: of an
// archive that was changed nothing else is known.
func (p *prover) readArchive(file io.ReadSeeker) bool {
	a := &archive{
		blobs: map[string][]byte{}, batches: map[string]*schemas.Batch{},
		records: map[schemas.UID]*schemas.GroupRecord{}, openings: map[schemas.UID]*schemas.Opening{},
		advantages: map[schemas.UID]*schemas.Advantage{}, trajectories: map[uint64]*schemas.Trajectory{},
		prompts: map[uint64]prompt{}, rewards: map[schemas.UID][]*schemas.Reward{},
		ratings:     map[schemas.UID][]*schemas.Rating{},
		stepRewards: map[schemas.UID][]*schemas.StepReward{}, selections: map[schemas.UID][]*schemas.Selection{},
	}
	p.archive = a
	sum, files := sha256.New(), 0
	_, err := file.Seek(0, io.SeekStart)
	if err == nil {
		_, err = export.CheckArchive(io.TeeReader(file, sum), func(e *export.Entry) error {
			files++
			return a.keep(e)
		})
	}
	if err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err == nil {
		err = export.CheckSeal(file)
	}
	p.report.Run, p.report.Archive = a.run, hex.EncodeToString(sum.Sum(nil))
	switch {
	case errors.Is(err, export.ErrUnsealed):
		p.add(LinkArchive, "", Unchecked, "%v", err)
	case err != nil:
		p.add(LinkArchive, "", Broken, "%v", err)
		return false
	default:
		p.add(LinkArchive, "", Holds, "%d files of run %s have their digests, and the archive has its own", files,
			a.run)
	}
	return true
}

// keep keeps an event, or a blob that may be an adapter.
func (a *archive) keep(e *export.Entry) error {
	if e.Blob != "" {
		if slices.ContainsFunc(a.policies, func(p *schemas.Policy) bool {
			return p.Adapter != nil && p.Adapter.File.Digest == e.Blob
		}) {
			a.blobs[e.Blob] = e.Data
		}
		return nil
	}
	switch of := e.Event().(type) {
	case *schemas.Update:
		if a.run = of.Run; of.Step > 0 {
			a.updates = append(a.updates, of)
		}
	case *schemas.Policy:
		a.policies = append(a.policies, of)
	case *schemas.Batch:
		a.batches[of.Batch] = of
	case *schemas.GroupRecord:
		a.run, a.records[of.UID] = of.Run, of
	case *schemas.Opening:
		a.openings[of.UID] = of
	case *schemas.Advantage:
		a.run, a.advantages[of.UID] = of.Run, of
	case *schemas.Reward:
		a.rewards[of.UID] = append(a.rewards[of.UID], of)
	case *schemas.Rating:
		a.ratings[of.UID] = append(a.ratings[of.UID], of)
	case *schemas.StepReward:
		a.stepRewards[of.UID] = append(a.stepRewards[of.UID], of)
	case *schemas.Selection:
		a.selections[of.UID] = append(a.selections[of.UID], of)
	case *schemas.Trajectory:
		a.trajectories[e.Seq] = of
	case *schemas.Prompt:
		if e.Invalid == nil {
			a.prompts[e.Seq] = prompt{of, e.Time}
		}
	}
	return nil
}

// importArchive stores the archive's run, with its versions of the weights, in the store of the walk.
func (p *prover) importArchive(ctx context.Context, file io.ReadSeeker) error {
	_, err := export.Import(ctx, p.bus, file, export.ImportOptions{WithoutSource: true, Policies: true})
	if err != nil {
		return fmt.Errorf("store the archive: %w", err)
	}
	return nil
}
