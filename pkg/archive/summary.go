package archive

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
	// Before are those of Bytes that an earlier WriteFile had written.
	Before int64 `json:"bytes_before,omitempty"`
	// Removed says that events which an earlier WriteFile had written are no longer stored: later ones may lack, too.
	Removed bool `json:"removed_meanwhile,omitempty"`
	// LeftOut counts stored events that are no events of their stream, which Write leaves out: no service reads them.
	LeftOut int `json:"left_out,omitempty"`
	// MissingTrajectories counts samples that have a reward in the archive and no trajectory, which streams drop first.
	// Of a pass it counts none: they are in the archive of its source run. Check counts them, Write does not.
	MissingTrajectories int `json:"missing_trajectories,omitempty"`
	// Refused counts prompts and controls with an Invalid. Check counts them, Write does not.
	Refused int `json:"refused,omitempty"`
	// Notes name what is counted in Missing, LeftOut and Refused: the first ones of each, in words.
	Notes []string `json:"notes,omitempty"`
}

const (
	// maxNotes bounds the notes of a kind.
	maxNotes = 10
	// missingBlob is the note about a blob.
	missingBlob = "missing: blob %s, which %q names"
)

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

// Check reads an archive as Read does, and calls each, unless it is nil, with every entry. It returns what the archive
// has and what it lacks: Import accepts what Check accepts. It stops at the first error, of the archive or of each.
func Check(r io.Reader, each func(*Entry) error) (*Summary, error) {
	return checkAll(r, newCheck(), each)
}

// checkAll is Check with a check that its caller keeps.
func checkAll(r io.Reader, c *check, each func(*Entry) error) (*Summary, error) {
	s := &Summary{Events: map[string]int{}}
	blobs, namedBy := map[string]bool{}, map[string]string{} // by digest
	var refused notes
	for e, err := range readFiles(r, c.addFile) {
		if err != nil {
			return nil, err
		}
		s.Bytes += int64(len(e.Data))
		if e.Blob != "" {
			s.Blobs++
			blobs[e.Blob] = true
		} else {
			s.Events[e.Stream]++
			c.references.add(e.event)
		}
		for _, ref := range e.Refs() {
			if namedBy[ref.Digest] == "" {
				namedBy[ref.Digest] = e.file()
			}
		}
		if e.Invalid != nil {
			refused.add("refused by the services: %q: %v", e.file(), e.Invalid)
		}
		if each != nil {
			if err := each(e); err != nil {
				return nil, err
			}
		}
	}
	var missing notes
	for _, digest := range slices.Sorted(maps.Keys(namedBy)) {
		if !blobs[digest] {
			missing.add(missingBlob, digest, namedBy[digest])
		}
	}
	gone := map[sampleID]bool{}
	for _, x := range c.references.samples {
		if x.run == c.run && !c.trajectories[x.seq] {
			gone[x.sampleID] = true
		}
	}
	for run := range c.references.sources {
		s.SourceRun = max(s.SourceRun, run)
	}
	s.Missing, s.Refused, s.MissingTrajectories = missing.n, refused.n, len(gone)
	s.Notes = append(missing.list(), refused.list()...)
	return s, nil
}
