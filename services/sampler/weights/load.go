package weights

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// loadPolicy loads the weights of a policy beside those in use, and checks them: their digest, and that the canary of
// an adapter, its output at a fixed input, differs from the checkpoint's. An error is a *engine.Refusal, unless it
// may pass.
func (v *Versions) loadPolicy(ctx context.Context, p *schemas.Policy) (_ *Loaded, err error) {
	w := &Loaded{Policy: p}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if base := v.base(); p.BaseDigest != "" && p.BaseDigest != base {
		return nil, engine.Refuse("base_digest: %.16s; must be of the checkpoint that this sampler has, %.16s", p.BaseDigest, base)
	}
	made, err := fetchChange(ctx, v.options.Bus, p)
	w.files = made.files
	if err != nil {
		return nil, err
	}
	for i, of := range v.options.Networks {
		m, err := of.With(ctx, made.Change)
		if isFull(err) { // the folder that servers read the weights from
			err = engine.Refuse("%w: free space, and push the version again", err)
		}
		if err != nil {
			return nil, err
		}
		if m != of {
			w.opened = append(w.opened, m)
		}
		if digest := m.Digest(); digest != p.WeightsDigest {
			return nil, engine.Refuse("weights_digest: %.16s; the weights that it names are %.16s", p.WeightsDigest, digest)
		}
		if i == 0 {
			if w.canary, err = m.Canary(ctx); err != nil {
				return nil, err
			}
			if v.baseCanary == nil {
				if v.baseCanary, err = of.Canary(ctx); err != nil {
					return nil, err
				}
			}
			if p.Adapter != nil && w.canary.Digest == v.baseCanary.Digest {
				return nil, engine.Refuse("canary: what the weights give at a fixed input is that of the checkpoint; " +
					"must be another: the adapter changes nothing")
			}
		}
		w.Engines = append(w.Engines, m.Engine(v.options.Engine))
	}
	return w, nil
}

// fetchedChange is what a policy changes in its checkpoint, with functions that unmap the files it is read from.
type fetchedChange struct {
	engine.Change
	files []func() error
}

// mappedFrom is the size in bytes from which on a blob is mapped from a file, not held in memory.
const mappedFrom = 4 << 20

// readBlob reads a blob of weights. A large one is copied to a temporary file and mapped, so that the system can take
// the memory back; the file is removed at once and lives as long as its mapping. unmap is nil where the data is in
// memory: for small blobs, and where no temporary file can be made.
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

// fetchChange reads the adapter or the full weights of a policy. Blobs that are missing, corrupt, cannot be parsed or
// do not fit into the folder for temporary files are a *engine.Refusal; other errors may pass. made.files are set with
// an error, too: the caller unmaps them.
func fetchChange(ctx context.Context, b *bus.Bus, p *schemas.Policy) (made fetchedChange, err error) {
	blob := func(field string, ref schemas.Ref) ([]byte, error) {
		file, unmap, err := readBlob(ctx, b, ref)
		if unmap != nil {
			made.files = append(made.files, unmap)
		}
		if errors.Is(err, bus.ErrNotFound) || errors.Is(err, bus.ErrCorrupt) {
			return nil, engine.Refuse("%s: %w", field, err)
		}
		if isFull(err) {
			return nil, engine.Refuse("%s: %d bytes do not fit into the folder for temporary files, %s: free "+
				"space there, or name another with TMPDIR, and push the version again: %w", field, ref.Size,
				os.TempDir(), err)
		}
		if err != nil {
			return nil, fmt.Errorf("fetch the weights of version %d: %w", p.PolicyVersion, err)
		}
		return file, nil
	}
	if p.Adapter != nil {
		file, err := blob("adapter.file", p.Adapter.File)
		if err != nil {
			return made, err
		}
		a, err := lora.Parse(fmt.Sprintf("of version %d", p.PolicyVersion), file, p.Adapter.Config)
		if err != nil {
			return made, engine.Refuse("adapter: %w", err)
		}
		made.Adapters = []lora.Weighted{{Adapter: a, Weight: p.Adapter.Scale}}
	}
	if len(p.Weights) == 0 {
		return made, nil
	}
	files, digests := make([][]byte, len(p.Weights)), make([]string, len(p.Weights))
	for i, ref := range p.Weights {
		if files[i], err = blob(fmt.Sprintf("weights[%d]", i), ref); err != nil {
			return made, err
		}
		digests[i] = ref.Digest
	}
	if made.Full, err = lora.ParseFull(files...); err != nil {
		return made, engine.Refuse("weights: %w", err)
	}
	made.Digest = lora.FullDigest(p.BaseDigest, digests...)
	return made, nil
}

// Apply returns m with the change of policy p, for meander verify. It returns m itself where p changes nothing; else
// the caller closes the network that is returned. Mapped files stay mapped. Blobs that are missing or do not fit are
// an error.
func Apply(ctx context.Context, b *bus.Bus, m engine.Network, p *schemas.Policy) (engine.Network, error) {
	made, err := fetchChange(ctx, b, p)
	if err != nil {
		return nil, err
	}
	return m.With(ctx, made.Change)
}
