package reward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

const (
	// pixelBytes is the memory that one pixel counts for: 4 bytes decoded, 4 more while another layout is converted,
	// and 8 for what functions make of the image.
	pixelBytes = 16
	// framePixelBytes is that of a pixel of each further frame of a video: functions look at one after the other.
	framePixelBytes = 4
	// conditionPixelBytes is that of a pixel of the sample for each file that it was conditioned on: functions decode
	// files of its size alone.
	conditionPixelBytes = 8
	// An image file has at most filePixelBytes for each pixel, and fileBytes: no PNG needs more.
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

// storedFile is a stored image or video.
type storedFile struct {
	what string // for errors
	size media.Size
	data []byte
	ref  *schemas.Ref // nil: data are the bytes
}

// imageFile returns the file of an image; nil if there is none.
func imageFile(im *schemas.Image) *storedFile {
	if im == nil {
		return nil
	}
	return &storedFile{"image", media.ImageSize(im.Height, im.Width), im.Data, im.Ref}
}

// videoFile returns the file with all frames of a sample: its video or, of one frame, its image.
func videoFile(t *schemas.Trajectory) *storedFile {
	v := t.Video
	if v == nil {
		return imageFile(t.Image)
	}
	return &storedFile{
		"video",
		media.Size{Frames: int(v.Frames), Height: int(v.Height), Width: int(v.Width)},
		nil,
		&v.Ref,
	}
}

// cost returns the memory in bytes that a file needs, by the size that its trajectory names, and conditions beside it.
// One that could never fit, or that is too large for its pixels, is a terminal error.
func (r *imageMemory) cost(f *storedFile, conditions []schemas.Condition) (int64, error) {
	frames, pixels, bytes := int64(f.size.Frames), int64(f.size.Width*f.size.Height), int64(len(f.data))
	if f.ref != nil {
		bytes = f.ref.Size
	}
	if most := frames * (filePixelBytes*pixels + fileBytes); bytes > most {
		return 0, bus.Terminal(schemas.CodeDecode,
			fmt.Errorf("%s: %d bytes; a PNG of %v has at most %d", f.what, bytes, f.size, most))
	}
	cost := pixelBytes*pixels + (frames-1)*framePixelBytes*pixels + bytes
	what := f.what
	for _, c := range conditions {
		cost += c.Ref.Size + conditionPixelBytes*pixels
		what = f.what + " and conditions"
	}
	if most := int64(r.mib) << 20; cost > most {
		return 0, bus.Terminal(schemas.CodeTooLarge,
			fmt.Errorf("%s: %v count for %d MiB; must be at most image_mib, %d", what, f.size, (cost+1<<20-1)>>20,
				r.mib))
	}
	return cost, nil
}

// sharedImage is the image or the video of a sample for all its functions, and what it was conditioned on. It is
// decoded only while a function uses it, so samples that wait take no memory.
type sharedImage struct {
	bus        *bus.Bus
	memory     *imageMemory
	stored     *storedFile
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
	if p.held.Empty() {
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
	image, video *sharedImage
}

// filesOf returns the files of a sample: the conditions are among them if one of its functions sees them.
func (s *service) filesOf(t *schemas.Trajectory) sampleFiles {
	var seen []schemas.Condition
	for _, spec := range t.Group.Reward {
		if e, err := s.catalog.find(spec.Name); err == nil && scorer.SeesConditions(e.scorer) {
			seen = t.Conditions
		}
	}
	return sampleFiles{
		&sharedImage{bus: s.bus, memory: s.images, stored: imageFile(t.Image), conditions: seen},
		&sharedImage{bus: s.bus, memory: s.images, stored: videoFile(t), conditions: seen},
	}
}

// load adds to in what a function sees; wait, release and error are those of a loader.
func (f *sampleFiles) load(ctx context.Context, wait bool, s scorer.Scorer, in *scorer.Input,
) (release func(), err error) {
	shared, frames := f.image, scorer.FramesOf(s)
	if frames > 1 {
		shared = f.video
	}
	m, err := shared.hold(ctx, wait)
	in.Media = m.Spaced(frames)
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

// loadFile reads an image or a video from the store and decodes it. The error is terminal if the bytes are not a PNG of
// the size that the event names.
func loadFile(ctx context.Context, b *bus.Bus, f *storedFile) (media.Media, error) {
	data := f.data
	if f.ref != nil {
		var err error
		if data, err = b.GetBlob(ctx, *f.ref); err != nil {
			return media.Media{}, fmt.Errorf("load %s: %w", f.what, err)
		}
	}
	m, err := media.Decode(data, f.size)
	if err != nil {
		return media.Media{}, bus.Terminal(schemas.CodeDecode, fmt.Errorf("%s: %w", f.what, err))
	}
	return m, nil
}
