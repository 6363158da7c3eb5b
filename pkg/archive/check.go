package archive

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// check compares the files of an archive with their digests, and steps with the trajectories that name them, which
// come later.
type check struct {
	sums map[string]string // by file
	// steps are the payload digests of steps and the files they are in, by subject. parts are parts whose step is not
	// complete yet, waiting the steps that lack parts.
	steps    map[string]step
	parts    map[string][]byte
	waiting  map[string]schemas.StepEvent
	complete bool
}

type step struct{ file, digest string }

func newCheck() *check {
	return &check{
		sums: map[string]string{}, steps: map[string]step{}, parts: map[string][]byte{},
		waiting: map[string]schemas.StepEvent{},
	}
}

// add checks the next file.
func (c *check) add(name string, e *Entry) error {
	if c.complete {
		return fmt.Errorf("%q: behind %s, which must be the last", name, sumsFile)
	}
	if name == sumsFile {
		c.complete = true
		return c.compare(string(e.Data))
	}
	sum := sha256.Sum256(e.Data)
	if c.sums[name] != "" {
		return fmt.Errorf("%q: is in it twice", name)
	}
	c.sums[name] = hex.EncodeToString(sum[:])
	err := c.checkEvent(name, e)
	if err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	return nil
}

// compare checks that the list of digests names the files that came, and no others.
func (c *check) compare(list string) error {
	listed := 0
	for line := range strings.Lines(list) {
		digest, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		switch got := c.sums[name]; {
		case !ok || got == "":
			return fmt.Errorf("%q: is in %s and nowhere else: it was taken out", name, sumsFile)
		case got != digest:
			return fmt.Errorf("%q: %w: its bytes are %s, %s says %s", name, bus.ErrCorrupt, got, sumsFile, digest)
		}
		listed++
	}
	if listed != len(c.sums) {
		return fmt.Errorf("%d files that are not in %s: they were added", len(c.sums)-listed, sumsFile)
	}
	return nil
}

// checkEvent notes a step or a part, and checks it and each trajectory against the events before.
func (c *check) checkEvent(file string, e *Entry) error {
	if e.Blob != "" {
		return nil
	}
	a, ok := schemas.ParseSubject(e.Subject)
	if !ok {
		return errors.New("no subject of the contract")
	}
	switch a.Kind {
	case schemas.KindStep, schemas.KindTokens:
		digest, err := schemas.PayloadDigest(e.Data)
		if err != nil {
			return err
		}
		c.steps[e.Subject] = step{file, digest}
		event := schemas.StepEvent(&schemas.Step{})
		if a.Kind == schemas.KindTokens {
			event = &schemas.Tokens{}
		}
		if err := schemas.Decode(e.Data, event); err != nil {
			return err
		}
		return c.checkParts(e.Subject, event)
	case schemas.KindPart, schemas.KindTokensPart:
		c.parts[e.Subject] = e.Data
		whole := strings.TrimSuffix(e.Subject, "."+a.Part)
		if event := c.waiting[whole]; event != nil {
			return c.checkParts(whole, event)
		}
	case schemas.KindTrajectory:
		return c.checkTrajectory(e)
	}
	return nil
}

// checkParts checks the parts of a step once all have come; until then the step waits.
func (c *check) checkParts(subject string, e schemas.StepEvent) error {
	last := int64(-1)
	for _, t := range e.Tensors() {
		if t.Parts != nil {
			last = max(last, t.Parts.First+t.Parts.Count-1)
		}
	}
	for k := range last + 1 {
		if c.parts[schemas.PartSubject(subject, k)] == nil {
			c.waiting[subject] = e
			return nil
		}
	}
	err := bus.JoinParts(e, func(k int64) ([]byte, error) { return c.parts[schemas.PartSubject(subject, k)], nil })
	delete(c.waiting, subject)
	for k := range last + 1 {
		delete(c.parts, schemas.PartSubject(subject, k))
	}
	return err
}

// checkTrajectory compares the steps of a completed sample with the digests that its trajectory names.
func (c *check) checkTrajectory(e *Entry) error {
	t := &schemas.Trajectory{}
	if err := schemas.Decode(e.Data, t); err != nil || t.StopReason != schemas.StopCompleted {
		return err
	}
	for i := range t.Steps {
		switch s, ok := c.steps[t.StepSubject(i)]; {
		case !ok:
			return fmt.Errorf("steps[%d]: %q is not in the export", i, t.StepSubject(i))
		case c.waiting[t.StepSubject(i)] != nil:
			return fmt.Errorf("steps[%d]: %q lacks parts", i, s.file)
		case s.digest != t.Steps[i].Digest:
			return fmt.Errorf("steps[%d]: %w: %q has the payload digest %s, the trajectory names %s",
				i, bus.ErrCorrupt, s.file, s.digest, t.Steps[i].Digest)
		}
	}
	return nil
}
