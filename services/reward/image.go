package reward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

const (
	// pixelBytes is the memory that one pixel counts for: 4 bytes decoded, 4 more while another layout is converted,
	// and 8 for what functions make of the image.
	pixelBytes = 16
	// framePixelBytes is that of a pixel of each further frame of a video: functions look at one after the other.
	framePixelBytes = 4
	// soundBytes is that of a value of a sound: 4 bytes decoded, 8 for what functions make of it.
	soundBytes = 12
	// conditionPixelBytes is that of a pixel of the sample for each file that it was conditioned on: functions decode
	// files of its size alone.
	conditionPixelBytes = 8
	// An image file has at most filePixelBytes for each pixel, and fileBytes: no PNG needs more, and no WAV.
	filePixelBytes = 8
	fileBytes      = 64 << 10
	// fetchTimeout bounds how long it takes to read an image from the store.
	fetchTimeout = time.Minute
)

// errNoMemory means that other images use the memory now.
var errNoMemory = errors.New("no memory for the image now")

// imageMemory bounds the memory of all images in use. A call that holds an image must not wait for another one:
// otherwise two calls could wait for each other.
type imageMemory struct {
	free *semaphore.Weighted
	mib  int
}

func newImageMemory(mib int) *imageMemory {
	return &imageMemory{semaphore.NewWeighted(int64(mib) << 20), mib}
}

// judged returns the file of a sample that a function sees: the one that the prompt names by its track or kind, else
// the pixels, else the sound. Of a video it is the image in the middle, unless the function sees several frames. nil:
// the sample has none.
func judged(t *schemas.Trajectory, track string, of interface{ Name() string }) *schemas.Medium {
	m := t.Shown()
	switch {
	case track != "":
		m = t.MediumOf(track)
	case m == nil || scorer.Hears(of.Name()):
		m = t.Medium(schemas.KindAudio)
	}
	if m != nil && m.Kind == schemas.KindVideo && scorer.FramesOf(of) <= 1 {
		return t.Medium(schemas.KindImage)
	}
	return m
}

// noMedium returns the error of a function whose file a completed sample does not have.
func noMedium(t *schemas.Trajectory, track string) error {
	if len(t.Media) > 0 {
		return fmt.Errorf("track: %q; the sample has %s", cmp.Or(track, schemas.KindAudio),
			strings.Join(t.MediaKinds(), ", "))
	}
	_, end := t.Segment()
	return fmt.Errorf("there is no image: the sample stops at step %d of %d with noise in it; stop.decode makes one",
		end, len(t.Transitions))
}

// cost returns the memory in bytes that a file needs, by the size that its trajectory names, and conditions beside it.
// One that could never fit, or that is too large for its pixels, is a terminal error.
func (r *imageMemory) cost(m *schemas.Medium, conditions []schemas.Condition) (int64, error) {
	frames, pixels, values, bytes := max(1, m.Frames), m.Width*m.Height, m.Samples*m.Channels, int64(len(m.Data))
	if m.Ref != nil {
		bytes = m.Ref.Size
	}
	if most := frames*(filePixelBytes*pixels+fileBytes) + soundBytes*values; bytes > most {
		return 0, bus.Terminal(schemas.CodeDecode,
			fmt.Errorf("%s: %d bytes; a %s of %s has at most %d", m.Kind, bytes, m.Format, sampling.MediumSize(m),
				most))
	}
	cost := pixelBytes*pixels + (frames-1)*framePixelBytes*pixels + soundBytes*values + bytes
	what := m.Kind
	for _, c := range conditions {
		cost += c.Ref.Size + conditionPixelBytes*pixels
		what = m.Kind + " and conditions"
	}
	if most := int64(r.mib) << 20; cost > most {
		return 0, bus.Terminal(schemas.CodeTooLarge,
			fmt.Errorf("%s: %s count for %d MiB; must be at most image_mib, %d", what, sampling.MediumSize(m),
				(cost+1<<20-1)>>20, r.mib))
	}
	return cost, nil
}

// sharedImage is the image, the video or the sound of a sample for all its functions, and what it was conditioned on.
// It is decoded only while a function uses it, so samples that wait take no memory.
type sharedImage struct {
	bus        *bus.Bus
	memory     *imageMemory
	stored     *schemas.Medium
	conditions []schemas.Condition // none where no function sees them

	mu    sync.Mutex
	users int
	cost  int64
	held  heldImage
}

// heldImage is an image in memory, with the files that it was conditioned on.
type heldImage struct {
	media.Media
	conditions []scorer.Condition
}

// hold returns the decoded image, which it loads if no other function of the sample uses it. Each success needs a
// release. If wait, it waits for memory; only a call that holds no image may do that. Otherwise it returns
// errNoMemory when there is none. Other errors are about the image or of ctx.
func (p *sharedImage) hold(ctx context.Context, wait bool) (heldImage, error) {
	if wait {
		p.mu.Lock()
	} else if !p.mu.TryLock() {
		return heldImage{}, errNoMemory
	}
	defer p.mu.Unlock()
	if p.users == 0 {
		cost, err := p.memory.cost(p.stored, p.conditions)
		switch {
		case err != nil:
			return heldImage{}, err
		case wait:
			if err := p.memory.free.Acquire(ctx, cost); err != nil {
				return heldImage{}, err
			}
		case !p.memory.free.TryAcquire(cost):
			return heldImage{}, errNoMemory
		}
		fetch, stop := context.WithTimeout(ctx, fetchTimeout)
		defer stop()
		m, err := loadFile(fetch, p.bus, p.stored)
		conditions, err2 := loadConditions(fetch, p.bus, p.conditions)
		if err := cmp.Or(err, err2); err != nil {
			p.memory.free.Release(cost)
			return heldImage{}, err
		}
		p.cost, p.held = cost, heldImage{m, conditions}
	}
	p.users++
	return p.held, nil
}

// release ends one use of the image. The last one frees its memory.
func (p *sharedImage) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users--; p.users == 0 {
		p.held = heldImage{}
		p.memory.free.Release(p.cost)
	}
}

// sampleFiles are what the functions of a sample look at.
type sampleFiles struct {
	media map[*schemas.Medium]*sharedImage
}

// filesOf returns the files of a sample: the conditions are among them if one of its functions sees them.
func (s *service) filesOf(t *schemas.Trajectory) *sampleFiles {
	var seen []schemas.Condition
	for _, spec := range t.Group.Reward {
		if e, err := s.catalog.find(spec.Name); err == nil && scorer.SeesConditions(e.scorer) {
			seen = t.Conditions
		}
	}
	files := &sampleFiles{map[*schemas.Medium]*sharedImage{}}
	for i := range t.Media {
		m := &t.Media[i]
		files.media[m] = &sharedImage{bus: s.bus, memory: s.images, stored: m, conditions: seen}
	}
	return files
}

// load adds to in what a function sees of a file; wait, release and error are those of a loader.
func (f *sampleFiles) load(ctx context.Context, wait bool, s scorer.Scorer, of *schemas.Medium, in *scorer.Input,
) (release func(), err error) {
	shared := f.media[of]
	m, err := shared.hold(ctx, wait)
	in.Media = m.Spaced(scorer.FramesOf(s))
	if scorer.SeesConditions(s) {
		in.Conditions = m.conditions
	}
	return shared.release, err
}

// loadConditions reads the files of conditions.
func loadConditions(ctx context.Context, b *bus.Bus, list []schemas.Condition) (out []scorer.Condition, err error) {
	for _, c := range list {
		file, err := b.GetBlob(ctx, *c.Ref)
		if err != nil {
			return nil, fmt.Errorf("load the condition %s: %w", c.Name, err)
		}
		out = append(out, scorer.Condition{Name: c.Name, Type: c.Type, File: file})
	}
	return out, nil
}

// loadFile reads a file from the store and decodes it. The error is terminal if the bytes are not of the format and
// size that the event names.
func loadFile(ctx context.Context, b *bus.Bus, m *schemas.Medium) (media.Media, error) {
	data := m.Data
	if m.Ref != nil {
		var err error
		if data, err = b.GetBlob(ctx, *m.Ref); err != nil {
			return media.Media{}, fmt.Errorf("load %s: %w", m.Kind, err)
		}
	}
	decoded, err := sampling.DecodeMedium(m, data)
	if err != nil {
		return decoded, bus.Terminal(schemas.CodeDecode, fmt.Errorf("%s: %w", m.Kind, err))
	}
	return decoded, nil
}
