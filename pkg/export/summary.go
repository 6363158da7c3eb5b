package export

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// Summary counts the content of an archive.
type Summary struct {
	// SourceRun is the run whose samples a pass scored; empty for other runs.
	SourceRun schemas.Run    `json:"source_run,omitempty"`
	Events    map[string]int `json:"events"` // by stream
	Blobs     int            `json:"blobs"`
	// Missing counts the blobs that events name and that are no longer stored.
	Missing int   `json:"missing_blobs"`
	Bytes   int64 `json:"bytes"` // of events and blobs
	// Before are those of Bytes that an earlier WriteArchiveFile had written.
	Before int64 `json:"bytes_before,omitempty"`
	// Removed says that events which an earlier WriteArchiveFile had written are no longer stored: later ones may lack,
	// too.
	Removed bool `json:"removed_meanwhile,omitempty"`
	// LeftOut counts stored messages that are no events of their stream, which no service reads. WriteArchive leaves
	// them out.
	LeftOut int `json:"left_out,omitempty"`
	// MissingTrajectories counts samples that have a reward in the archive and no trajectory, which streams drop first.
	// Of a pass it counts none: they are in the archive of its source run.
	MissingTrajectories int `json:"missing_trajectories,omitempty"`
	// FreedSteps counts steps that were freed once all had read them: their prompt said so.
	FreedSteps int `json:"freed_steps,omitempty"`
	// Refused counts prompts and controls with an Invalid.
	Refused int `json:"refused,omitempty"`
	// Notes name what is counted in Missing, LeftOut and Refused: the first ones of each, in words.
	Notes []string `json:"notes,omitempty"`
}

// maxNotes bounds the notes of a kind.
const maxNotes = 10

// notes are lines about things of one kind.
type notes struct {
	lines []string
	n     int
}

func (n *notes) add(format string, args ...any) {
	if n.n++; n.n <= maxNotes {
		n.lines = append(n.lines, strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", "; "))
	}
}

// list returns the first lines, and how many there are beyond them.
func (n *notes) list() []string {
	if n.n > maxNotes {
		return append(slices.Clone(n.lines), fmt.Sprintf("and %d more", n.n-maxNotes))
	}
	return n.lines
}

// tally is what an archive has, and what its events name.
type tally struct {
	run              schemas.Run
	summary          Summary
	blobs            map[string]bool     // by digest
	refs             map[string]namedRef // by digest
	references       references
	trajectories     map[uint64]bool // by sequence
	weights          map[weights]bool
	trained          bool // a trainer told of updates
	leftOut, refused notes
}

// weights are a version of the weights of a tenant of a lane, by their digest, or by the version where a sample has
// several.
type weights struct {
	of      schemas.Lineage
	digest  string
	version int64
}

// namedRef is a blob, and the first file that names it.
type namedRef struct {
	schemas.Ref
	by string
}

func newTally(run schemas.Run) *tally {
	return &tally{
		run: run, summary: Summary{Events: map[string]int{}}, blobs: map[string]bool{}, refs: map[string]namedRef{},
		references:   references{sources: map[schemas.Run]bool{}, prompts: map[uint64]sampleID{}},
		trajectories: map[uint64]bool{}, weights: map[weights]bool{},
	}
}

// count counts a file of the archive.
func (t *tally) count(e *Entry) {
	t.summary.Bytes += int64(len(e.Data))
	if e.Blob != "" {
		t.summary.Blobs++
		t.blobs[e.Blob] = true
		return
	}
	t.summary.Events[e.Stream]++
	t.summary.SourceRun = max(t.summary.SourceRun, t.references.add(e.event))
	if e.Stream == schemas.StreamTrajectories {
		t.trajectories[e.Seq] = true
	}
	switch of := e.event.(type) {
	case *schemas.Trajectory:
		t.weights[weights{of.Lineage(), of.WeightsDigest, 0}] = true
		for v := of.PolicyVersionMin; v < of.PolicyVersionMax; v++ {
			t.weights[weights{of.Lineage(), "", v}] = true
		}
	case *schemas.Update:
		t.trained = true
		t.weights[weights{of.Lineage(), of.WeightsDigest, 0}] = true
		t.weights[weights{of.Lineage(), of.WeightsBefore, 0}] = true
	}
	for _, ref := range e.Refs() {
		if _, named := t.refs[ref.Digest]; !named {
			t.refs[ref.Digest] = namedRef{ref, e.file()}
		}
	}
	if e.Invalid != nil {
		t.refused.add("refused by the services: %q: %v", e.file(), e.Invalid)
	}
}

// summarize returns what the archive has and lacks.
func (t *tally) summarize() *Summary {
	var missing notes
	for _, digest := range slices.Sorted(maps.Keys(t.refs)) {
		if !t.blobs[digest] {
			missing.add("missing: blob %s, which %q names", digest, t.refs[digest].by)
		}
	}
	gone := map[sampleID]bool{}
	for _, x := range t.references.samples {
		if x.run == t.run && !t.trajectories[x.seq] {
			gone[x.sampleID] = true
		}
	}
	s := t.summary
	s.LeftOut, s.Missing, s.Refused, s.MissingTrajectories = t.leftOut.n, missing.n, t.refused.n, len(gone)
	s.Notes = slices.Concat(t.leftOut.list(), missing.list(), t.refused.list())
	return &s
}

// CheckArchive reads an archive as ReadArchive does, and calls each, unless it is nil, with every entry. It returns
// what the archive has and what it lacks: Import accepts what CheckArchive accepts. It stops at the first error, of the
// archive or of each.
func CheckArchive(r io.Reader, each func(*Entry) error) (*Summary, error) {
	c := newCheck()
	for e, err := range readFiles(r, c.addFile) {
		if err == nil && each != nil {
			err = each(e)
		}
		if err != nil {
			return nil, err
		}
	}
	return c.summarize(), nil
}
