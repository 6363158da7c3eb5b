package export

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// check compares the files of an archive with their digests, events with the contract, and steps with the trajectories
// that name them, which come later.
type check struct {
	*tally
	sums map[string]string // by file
	// All are by subject. parts are parts whose step is not complete yet, incomplete the steps that lack parts.
	steps      map[string]step
	parts      map[string][]byte
	incomplete map[string]schemas.StepEvent
	// seqs are the files by stream and sequence, subjects those of streams that keep one event for each subject.
	seqs     map[string]string
	subjects map[string]string
	complete bool
	notes    *bus.Notes // what people say of the run; nil: nothing
}

type step struct {
	file   string
	seq    uint64
	digest string // payload digest
}

func newCheck() *check {
	return &check{
		tally: newTally(""), sums: map[string]string{}, steps: map[string]step{}, parts: map[string][]byte{},
		incomplete: map[string]schemas.StepEvent{}, seqs: map[string]string{}, subjects: map[string]string{},
	}
}

// addFile checks the next file that Read has read, against the files before it; the file of digests must come last
// and is compared with all. An error says what was changed, and ends Read.
func (c *check) addFile(name string, e *Entry) error {
	if c.complete {
		return fmt.Errorf("%q: behind %s, which must be the last", name, sumsFile)
	}
	if name == sumsFile {
		c.complete = true
		return c.compareSums(string(e.Data))
	}
	sum := sha256.Sum256(e.Data)
	if c.sums[name] != "" {
		return fmt.Errorf("%q: is in it twice", name)
	}
	c.sums[name] = hex.EncodeToString(sum[:])
	if name == notesFile {
		c.notes = &bus.Notes{}
		if err := errors.Join(json.Unmarshal(e.Data, c.notes), c.notes.Validate()); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		return nil
	}
	if err := c.checkEvent(name, e); err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	c.count(e)
	return nil
}

// checkUnchanged checks that a file is the one that addFile has checked, where an archive is read again.
func (c *check) checkUnchanged(name string, e *Entry) error {
	sum := sha256.Sum256(e.Data)
	if name != sumsFile && c.sums[name] != hex.EncodeToString(sum[:]) {
		return fmt.Errorf("%q: has changed since it was checked", name)
	}
	return nil
}

// compareSums checks that the archive's list of digests names exactly the files that came. An error names the file that
// was added, taken out or changed.
func (c *check) compareSums(list string) error {
	listed, n := map[string]bool{}, 0
	for line := range strings.Lines(list) {
		if n++; strings.HasPrefix(line, sealMark) {
			continue // see CheckSeal
		}
		digest, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		switch got := c.sums[name]; {
		case !ok:
			return fmt.Errorf("%s, line %d: must be a digest, two spaces and the name of a file", sumsFile, n)
		case listed[name]:
			return fmt.Errorf("%s, line %d: %q: is in it twice", sumsFile, n, name)
		case got == "":
			return fmt.Errorf("%q: is in line %d of %s and missing from the archive", name, n, sumsFile)
		case got != digest:
			return fmt.Errorf("%q: %w: its bytes are %s, line %d of %s says %s", name, bus.ErrCorrupt, got, n, sumsFile,
				digest)
		}
		listed[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(c.sums)) {
		if !listed[name] {
			return fmt.Errorf("%q: is one of %d files that are not listed in %s", name,
				len(c.sums)-len(listed), sumsFile)
		}
	}
	return nil
}

// checkEvent checks an event: by its schema, and against those before it, a trajectory against its steps, a step
// against its parts. Of steps and parts it keeps what later events are checked with. An error means that the archive is
// not as it was written.
func (c *check) checkEvent(file string, e *Entry) error {
	if e.Blob != "" {
		return nil
	}
	a, err := parseSubjectIn(e.Stream, e.Subject)
	if err == nil {
		err = c.checkUnique(file, e, a.Run)
	}
	if err != nil {
		return err
	}
	if e.event, err = decodeEvent(e.Subject, e.Data); err != nil && !isInput(e.Stream) {
		return err
	}
	e.Invalid = err
	switch event := e.event.(type) {
	case schemas.StepEvent:
		digest, err := schemas.PayloadDigest(e.Data)
		if err != nil {
			return err
		}
		c.steps[e.Subject] = step{file, e.Seq, digest}
		return c.checkParts(e.Subject, event)
	case *schemas.Trajectory:
		return c.checkTrajectory(event)
	}
	if a.Part != "" {
		c.parts[e.Subject] = e.Data
		whole := strings.TrimSuffix(e.Subject, "."+a.Part)
		if event := c.incomplete[whole]; event != nil {
			return c.checkParts(whole, event)
		}
	}
	return nil
}

// checkUnique checks that an event is of the run of those before it, and that none of them has its sequence, or its
// subject in a stream that stores a subject once: Import could store one of the two only.
func (c *check) checkUnique(file string, e *Entry, run schemas.Run) error {
	if e.Stream != schemas.StreamPolicies {
		if c.run != "" && run != c.run {
			return fmt.Errorf("is of run %q, and those before it of run %q", run, c.run)
		}
		c.run = run
	}
	place := e.Stream + " " + strconv.FormatUint(e.Seq, 10)
	if before := c.seqs[place]; before != "" {
		return fmt.Errorf("has sequence %d, as %q", e.Seq, before)
	}
	c.seqs[place] = file
	if spec, _ := schemas.StreamNamed(e.Stream); !spec.Guarded {
		return nil
	}
	if before := c.subjects[e.Subject]; before != "" {
		return fmt.Errorf("has the same subject as %q; %s has one event for each subject", before, e.Stream)
	}
	c.subjects[e.Subject] = file
	return nil
}

// checkParts joins the parts of a large step and checks them against the step, as soon as all have come. Until then
// it keeps the step in incomplete and returns nil: checkEvent calls it again for each part.
func (c *check) checkParts(subject string, e schemas.StepEvent) error {
	last := int64(-1)
	for _, t := range e.Tensors() {
		if t.Parts != nil {
			last = max(last, t.Parts.First+t.Parts.Count-1)
		}
	}
	for k := range last + 1 {
		if c.parts[schemas.PartSubject(subject, k)] == nil {
			c.incomplete[subject] = e
			return nil
		}
	}
	err := bus.JoinParts(e, func(k int64) ([]byte, error) { return c.parts[schemas.PartSubject(subject, k)], nil })
	delete(c.incomplete, subject)
	for k := range last + 1 {
		delete(c.parts, schemas.PartSubject(subject, k))
	}
	return err
}

// checkTrajectory compares the steps that came before a completed trajectory with the digests that it names. It fails
// on a step that is missing, incomplete or different.
func (c *check) checkTrajectory(t *schemas.Trajectory) error {
	if t.StopReason != schemas.StopCompleted {
		return nil
	}
	for i := range t.Steps {
		s, ok := c.steps[t.StepSubject(i)]
		named, has := t.Steps[i].Digest, s.digest
		switch {
		case !ok && t.Group.FreeReadSteps:
			c.summary.FreedSteps++
		case !ok:
			return fmt.Errorf("steps[%d]: %q is not in the export", i, t.StepSubject(i))
		case c.incomplete[t.StepSubject(i)] != nil:
			return fmt.Errorf("steps[%d]: %q lacks parts", i, s.file)
		case s.seq != t.Steps[i].Seq:
			return fmt.Errorf("steps[%d]: names sequence %d of %s, and the step is %q", i, t.Steps[i].Seq,
				schemas.StreamSteps, s.file)
		case has != named:
			return fmt.Errorf("steps[%d]: %w: %q has the payload digest %s, the trajectory names %s",
				i, bus.ErrCorrupt, s.file, has, named)
		}
	}
	return nil
}

// sealMark begins the line of SHA256SUMS with the digest of all that is before that file; sha256sum skips it.
const sealMark = "# archive "

// ErrUnsealed says that an archive has no digest of itself: an older version wrote it, or another program its tar.
var ErrUnsealed = errors.New("no digest of the whole archive is in it: the times of its files cannot be checked")

// CheckSeal checks each byte of an archive that is not content of its files, which CheckArchive checks: names, times
// and sizes, and what is between the files and behind them. An error names the place.
func CheckSeal(r io.Reader) error {
	var raw, again bytes.Buffer
	in := io.TeeReader(r, &raw)
	sum := sha256.New()
	files, w := tar.NewReader(in), tar.NewWriter(io.MultiWriter(&again, sum))
	newest, sealed, changed := time.Time{}, false, error(nil)
	same := func(where string) {
		if changed == nil && !bytes.Equal(raw.Bytes(), again.Bytes()) {
			changed = fmt.Errorf("archive: bytes %s are not those that were written", where)
		}
		raw.Reset()
		again.Reset()
	}
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("archive: %w", err)
		}
		if err := w.Flush(); err != nil {
			return err
		}
		before := fmt.Sprintf("%x", sum.Sum(nil))
		header = &tar.Header{
			Name: header.Name, Mode: 0o644, Size: header.Size, ModTime: header.ModTime, Format: tar.FormatPAX,
		}
		if err := w.WriteHeader(header); err != nil {
			return fmt.Errorf("archive: %q: %w", header.Name, err)
		}
		same(fmt.Sprintf("before %q", header.Name))
		data, err := io.ReadAll(files)
		if err == nil {
			_, err = w.Write(data)
		}
		if err != nil {
			return fmt.Errorf("archive: %q: %w", header.Name, err)
		}
		if header.Name != sumsFile {
			if header.ModTime.After(newest) {
				newest = header.ModTime
			}
			continue
		}
		digest := ""
		if _, digest, sealed = strings.Cut(string(data), "\n"+sealMark); !sealed {
			return ErrUnsealed
		}
		if changed == nil && (strings.TrimSuffix(digest, "\n") != before || !header.ModTime.Equal(newest)) {
			changed = fmt.Errorf("archive: the time of a file is not that which was written")
		}
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	same("behind " + sumsFile)
	if !sealed {
		return ErrUnsealed
	}
	return changed
}
