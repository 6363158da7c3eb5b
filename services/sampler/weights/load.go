package weights

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"syscall"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/weightsdir"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// loadPolicy loads the weights of a policy on each device that is not lost, and checks their digest and canary. An
// error is a *engine.Refusal, unless it may pass, or says that no device is left.
func (v *Versions) loadPolicy(ctx context.Context, p *schemas.Policy) (_ *Loaded, err error) {
	w := &Loaded{Policy: p, Engines: make([]engine.Engine, len(v.options.Networks))}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if base := v.base(); p.BaseDigest != "" && p.BaseDigest != base {
		return nil, engine.Refuse("base_digest: %.16s; must be of the checkpoint that this sampler has, %.16s",
			p.BaseDigest, base)
	}
	made, err := fetchChange(ctx, v.options.Source, p)
	defer func() { err = errors.Join(err, made.close()) }()
	if err != nil {
		return nil, err
	}
	living, lost := 0, error(nil)
	for i := range v.options.Networks {
		if v.options.IsLost != nil && v.options.IsLost(i) {
			continue
		}
		err := v.loadOn(ctx, i, &made, w, living == 0)
		switch {
		case errors.Is(err, tensor.ErrDeviceLost): // the others go on without it
			lost = err
			if v.options.Lost != nil {
				v.options.Lost(ctx, i, err)
			}
		case err != nil:
			return nil, err
		default:
			living++
		}
	}
	if living == 0 {
		return nil, fmt.Errorf("no device is left: %w", cmp.Or(lost, tensor.ErrDeviceLost))
	}
	return w, nil
}

// loadOn loads the weights of w on one device. The first device that is not lost computes the canary.
func (v *Versions) loadOn(ctx context.Context, device int, made *fetchedChange, w *Loaded, isFirst bool) error {
	p, of := w.Policy, v.options.Networks[device]
	m, err := made.apply(ctx, of)
	if isFull(err) { // the folder that servers read the weights from
		err = engine.Refuse("%w: free space, and push the version again", err)
	}
	if err != nil {
		return err
	}
	if m != of {
		w.opened = append(w.opened, m)
	}
	if digest := m.Digest(); digest != p.WeightsDigest {
		return engine.Refuse("weights_digest: %.16s; the weights that it names are %.16s", p.WeightsDigest, digest)
	}
	if isFirst {
		canary, err := m.Canary(ctx)
		if err != nil {
			return err
		}
		if p.Adapter != nil && (v.baseCanary == nil || v.baseDevice != device) {
			if v.baseCanary, err = of.Canary(ctx); err != nil {
				return err
			}
			v.baseDevice = device
		}
		if p.Adapter != nil && canary.Digest == v.baseCanary.Digest {
			return engine.Refuse("canary: what the weights give at a fixed input is that of the checkpoint; " +
				"must be another: the adapter changes nothing")
		}
		w.canary = canary
	}
	w.Engines[device] = m.Engine(v.options.Engine)
	return nil
}

// Source is where the weights of policies are.
type Source struct {
	Bus *bus.Bus
	// Dir is the folder with the files of those that were pushed by path; empty: there is none here.
	Dir string
}

// fetchedChange is what a policy changes in its checkpoint. It is read from files, which are closed once it is loaded.
type fetchedChange struct {
	engine.Change
	unmaps []func() error     // of blobs
	shared []*weightsdir.File // of the shared folder
}

// apply returns n with the change. Files of the shared folder that are written to meanwhile are a *engine.Refusal.
func (c *fetchedChange) apply(ctx context.Context, n engine.Network) (m engine.Network, err error) {
	err = catchCutOff(func() (err error) {
		m, err = n.With(ctx, c.Change)
		return err
	})
	if errors.Is(err, safetensors.ErrChanged) {
		return nil, engine.Refuse("weights: %w", err)
	}
	for _, f := range c.shared {
		if changed := f.Unchanged(); changed != nil {
			if err == nil && m != n {
				changed = errors.Join(changed, m.Close())
			}
			return nil, engine.Refuse("weights: %w", changed)
		}
	}
	return m, err
}

// catchCutOff makes it a *engine.Refusal that a mapped file which load reads is cut off; else the process ends.
func catchCutOff(load func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case interface { // of memory
			error
			Addr() uintptr
		}:
			err = engine.Refuse("weights: a file was cut off while it was loaded: %w", fault)
		default:
			panic(fault)
		}
	}()
	return load()
}

// close unmaps and closes the files, once the change is loaded or refused.
func (c *fetchedChange) close() (err error) {
	for _, unmap := range c.unmaps {
		err = errors.Join(err, unmap())
	}
	for _, f := range c.shared {
		err = errors.Join(err, f.Close())
	}
	return err
}

// mappedFrom is the size in bytes from which on a blob is mapped from a file, not held in memory.
const mappedFrom = 4 << 20

// readBlob reads a blob of weights. A large one is mapped from a temporary file, removed at once, so that the system
// can take the memory back; unmap is nil where the data is in memory.
func readBlob(ctx context.Context, b *bus.Bus, ref schemas.Ref) (data []byte, unmap func() error, err error) {
	if ref.Size < mappedFrom {
		data, err = b.GetBlob(ctx, ref)
		return data, nil, err
	}
	f, err := os.CreateTemp("", "meander-weights-*")
	if err != nil {
		var all bytes.Buffer
		err = b.CopyBlob(ctx, ref, &all)
		return all.Bytes(), nil, err
	}
	err = errors.Join(os.Remove(f.Name()), b.CopyBlob(ctx, ref, f))
	if err == nil {
		data, unmap, err = safetensors.Map(f)
	}
	return data, unmap, errors.Join(err, f.Close())
}

// isFull reports whether an error says that a disk, a quota or the size that files may have is used up.
func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EFBIG)
}

// fetchChange reads what a policy changes. Files that are missing, wrong, or do not fit into the temporary folder are a
// *engine.Refusal. The caller closes made, with an error, too.
func fetchChange(ctx context.Context, from Source, p *schemas.Policy) (made fetchedChange, err error) {
	if p.Adapter != nil {
		file, err := made.blob(ctx, from, "adapter.file", p.Adapter.File)
		if err != nil {
			return made, err
		}
		a, err := lora.Parse(fmt.Sprintf("of version %d", p.PolicyVersion), file.Bytes, p.Adapter.Config)
		if err != nil {
			return made, engine.Refuse("adapter: %w", err)
		}
		if note := a.Note(); note != "" {
			zerolog.Ctx(ctx).Info().Int64("policy_version", p.PolicyVersion).Msg(note)
		}
		made.Adapters = []lora.Weighted{{Adapter: a, Weight: p.Adapter.Scale}}
	}
	if len(p.Weights) == 0 {
		return made, nil
	}
	files, digests := make([]safetensors.Contents, len(p.Weights)), make([]string, len(p.Weights))
	for i, w := range p.Weights {
		read, field := made.sharedFile, fmt.Sprintf("weights[%d]", i)
		if w.Path == "" {
			read = func(ctx context.Context, from Source, field string, w schemas.WeightsFile) (safetensors.Contents,
				error,
			) {
				return made.blob(ctx, from, field, w.Blob())
			}
		}
		if files[i], err = read(ctx, from, field, w); err != nil {
			return made, err
		}
		digests[i] = w.Digest
	}
	err = catchCutOff(func() (err error) {
		if made.Full, err = lora.FullOf(files...); err != nil {
			return engine.Refuse("weights: %w", err)
		}
		return nil
	})
	if err != nil {
		return made, err
	}
	made.Digest = lora.FullDigest(p.BaseDigest, digests...)
	return made, nil
}

// blob reads a blob of the policy's field of that name.
func (c *fetchedChange) blob(ctx context.Context, from Source, field string, ref schemas.Ref,
) (f safetensors.Contents, err error) {
	f.Name = "blob " + ref.Digest
	data, unmap, err := readBlob(ctx, from.Bus, ref)
	if f.Bytes, f.Mapped = data, unmap != nil; unmap != nil {
		c.unmaps = append(c.unmaps, unmap)
	}
	_, invalid := errors.AsType[*bus.TerminalError](err)
	switch {
	case invalid, errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return f, engine.Refuse("%s: %w", field, err)
	case isFull(err):
		return f, engine.Refuse("%s: %d bytes do not fit into the folder for temporary files, %s: free space there, "+
			"or name another with TMPDIR, and push the version again: %w", field, ref.Size, os.TempDir(), err)
	case err != nil:
		return f, fmt.Errorf("fetch the weights: %s: %w", field, err)
	}
	return f, nil
}

// sharedFile opens and checks a file of the shared folder.
func (c *fetchedChange) sharedFile(ctx context.Context, from Source, field string, w schemas.WeightsFile,
) (f safetensors.Contents, err error) {
	if from.Dir == "" {
		return f, engine.Refuse("%s: %q lies in a shared folder, and none is given here: start with --weights-dir",
			field, w.Path)
	}
	dir, err := weightsdir.Open(from.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return f, engine.Refuse("%s: %w", field, err)
	}
	if err != nil {
		return f, fmt.Errorf("%s: %w", field, err)
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	file, err := dir.File(ctx, w)
	switch {
	case errors.Is(err, weightsdir.ErrUnfit):
		return f, engine.Refuse("%s: %w", field, err)
	case err != nil:
		return f, fmt.Errorf("%s: %w", field, err)
	}
	c.shared = append(c.shared, file)
	return file.Contents, nil
}

// Apply returns m with the change of policy p, for meander verify; m itself where p changes nothing.
func Apply(ctx context.Context, from Source, m engine.Network, p *schemas.Policy) (_ engine.Network, err error) {
	made, err := fetchChange(ctx, from, p)
	defer func() { err = errors.Join(err, made.close()) }()
	if err != nil {
		return nil, err
	}
	return made.apply(ctx, m)
}
