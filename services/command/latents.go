package command

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// states are the states in a safetensors file that samples start from.
type states struct {
	path    string
	archive *safetensors.Archive
	// read caches tensors by name, as maps of an event.
	read map[string]map[string]any
}

// noStates stands for the states while the flags are checked; each prompt gets those of its group later.
var noStates = map[string]any{"dtype": "F32", "shape": []int64{1, 1, 1}, "data": make([]byte, 4)}

// openStates opens the file of --start-latents.
func (p *promptFlags) openStates(path string) error {
	a, err := safetensors.Open(path)
	if err != nil {
		return fmt.Errorf("--start-latents: %w", err)
	}
	p.states = &states{path: path, archive: a, read: map[string]map[string]any{}}
	return nil
}

func (s *states) close() {
	if s != nil {
		_ = s.archive.Close() // mapped for reading
	}
}

// latentsOf returns the latents that group uid starts with, of the file of --start-latents, before a step (-1:
// unknown). It looks for the tensors "<uid>.latents.<step>" and "latents.<step>", as --save-latents writes them, then
// "latents", then for the only tensor of the file or of its only group. It fails if there is none of these.
func (s *states) latentsOf(uid schemas.UID, step int64) (map[string]any, error) {
	names := s.archive.Names()
	var wanted []string
	if step >= 0 {
		wanted = []string{fmt.Sprintf("%s.latents.%d", uid, step), fmt.Sprintf("latents.%d", step)}
	}
	wanted = append(wanted, "latents")
	for _, name := range wanted {
		if slices.Contains(names, name) {
			return s.readTensor(name)
		}
	}
	if len(names) == 1 {
		return s.readTensor(names[0])
	}
	if theirs := onlyLatents(names, step); theirs != "" {
		return s.readTensor(theirs)
	}
	return nil, fmt.Errorf("--start-latents: %s has %s, among them %q; must have %s, or one tensor alone",
		s.path, present.Count(len(names), "tensor"), names[:min(len(names), 8)], strings.Join(wanted, " or "))
}

// onlyLatents returns the name of the tensor of latents before a step (-1: any) if the file has exactly one; else "".
func onlyLatents(names []string, step int64) string {
	var found []string
	for _, name := range names {
		if _, index, ok := strings.Cut(name, ".latents."); ok && (step < 0 || index == fmt.Sprint(step)) {
			found = append(found, name)
		}
	}
	if len(found) != 1 {
		return ""
	}
	return found[0]
}

// readTensor reads a tensor of the file as [n, S, C]; [S, C] becomes [1, S, C], one state for all samples.
func (s *states) readTensor(name string) (map[string]any, error) {
	if t := s.read[name]; t != nil {
		return t, nil
	}
	info, _ := s.archive.Info(name)
	data, err := s.archive.Bytes(name)
	if err != nil {
		return nil, fmt.Errorf("--start-latents: %w", err)
	}
	var shape []int64
	if len(info.Shape) == 2 {
		shape = []int64{1}
	}
	for _, d := range info.Shape {
		shape = append(shape, int64(d))
	}
	t := map[string]any{"dtype": string(info.DType), "shape": shape, "data": slices.Clone(data)}
	s.read[name] = t
	return t, nil
}

// startOf returns the field start of a prompt; nil if there is none.
func startOf(body map[string]any) map[string]any {
	start, _ := body["start"].(map[string]any)
	return start
}

// setStart gives a prompt its latents of the file, unless the prompt has a start of its own. It fails if the file has
// none for it.
func (s *states) setStart(p prompt, own bool) error {
	if s == nil || own {
		return nil
	}
	start := maps.Clone(startOf(p.body)) // prompts share what the flags say
	step := int64(0)
	if start["sigma"] != nil {
		step = -1
	} else if n, ok := start["step_index"].(int64); ok {
		step = n
	}
	var err error
	start["latents"], err = s.latentsOf(p.uid, step)
	p.body["start"] = start
	return err
}

// maxInlineLatents is the most bytes of states or images that a prompt carries itself.
const maxInlineLatents = 64 << 10

// moveToObjectStore moves large latents or images that a prompt starts with, and files of its conditions, to the object
// store, because a message is
// limited in size. An error is of the server.
func (p prompt) moveToObjectStore(ctx context.Context, b *bus.Bus) error {
	if p.files != nil {
		if err := p.files.store(ctx, b, p.body); err != nil {
			return err
		}
	}
	if images, size := inlineImages(p.body); size > maxInlineLatents {
		for _, m := range images {
			if err := moveToBlob(ctx, b, m, "images"); err != nil {
				return err
			}
		}
	}
	t, ok := startOf(p.body)["latents"].(map[string]any)
	if !ok {
		return nil
	}
	data, ok := t["data"].([]byte)
	if !ok || len(data) <= maxInlineLatents {
		return nil
	}
	return moveToBlob(ctx, b, t, "states")
}

// moveToBlob stores the data of a map in the object store, and puts a reference in their place.
func moveToBlob(ctx context.Context, b *bus.Bus, t map[string]any, what string) error {
	ref, err := b.PutBlob(ctx, t["data"].([]byte))
	if err != nil {
		return fmt.Errorf("store the %s to start with: %w", what, err)
	}
	delete(t, "data")
	t["ref"] = map[string]any{"bucket": ref.Bucket, "digest": ref.Digest, "size": ref.Size}
	return nil
}
