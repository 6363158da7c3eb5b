package lora

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Save writes the adapter with its weight to a new folder, in the plainest form of PEFT, which every server takes:
// weights in float32, and a configuration without patterns. All modules get the largest rank, with rows of zeros, and
// the scale 1: the weight and the scale of a module are multiplied into its lora_B, each element rounded once. A
// product of a rank above the smaller side of its weight, which servers do not take, is written as its sum. The folder
// is there with both files or not at all; it is no error that it is there already.
func (a Weighted) Save(dir string) error {
	return saveFolder(dir, "adapter "+a.Adapter.name, func(made string) error {
		tensors, config, err := a.plain()
		if err != nil {
			return err
		}
		return errors.Join(
			safetensors.WriteFile(filepath.Join(made, PEFTWeights), tensors, map[string]string{"format": "pt"}),
			os.WriteFile(filepath.Join(made, PEFTConfig), config, 0o644),
		)
	})
}

// saveFolder has write write files to a new folder, which is there with all of them or not at all; it is no error that
// it is there already. All may be read by a server of another user, whatever the umask is.
func saveFolder(dir, what string, write func(made string) error) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	made, err := os.MkdirTemp(filepath.Dir(dir), ".weights-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", what, err)
	}
	if err = errors.Join(os.Chmod(made, 0o755), write(made)); err == nil {
		var files []string
		files, err = filepath.Glob(filepath.Join(made, "*"))
		for _, file := range files {
			err = errors.Join(err, os.Chmod(file, 0o644))
		}
	}
	if err == nil {
		err = os.Rename(made, dir)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", what, err), os.RemoveAll(made))
	}
	return nil
}

// Zero returns an adapter of rank 1 for one projection of a model that adds zeros. A server that is asked for the model
// with it computes the model alone.
func (t Table) Zero() Weighted {
	name := slices.Min(slices.Collect(maps.Keys(t)))
	return Weighted{
		Adapter: &Adapter{name: "zero", modules: map[string]*Product{name: zeroProduct(t[name])}},
		Weight:  1,
	}
}

// Completed returns the adapter with zeros added, so that of the modules of t that differ in the parts at their ends
// alone it changes all or none: for servers that compute them as one, and do not take a part of them.
func (a Weighted) Completed(t Table, parts ...string) Weighted {
	all := maps.Clone(a.Adapter.modules)
	for name := range a.Adapter.modules {
		for _, part := range parts {
			stem, ok := strings.CutSuffix(name, part)
			for _, other := range parts {
				if shape, is := t[stem+other]; ok && is && all[stem+other] == nil {
					all[stem+other] = zeroProduct(shape)
				}
			}
		}
	}
	return Weighted{Adapter: &Adapter{name: a.Adapter.name, modules: all}, Weight: a.Weight}
}

func zeroProduct(shape [2]int) *Product {
	return &Product{
		A: make([]float32, shape[1]), B: make([]float32, shape[0]), R: 1, N: shape[0], K: shape[1],
		Scale: 1,
	}
}

// plain returns the tensors and the configuration that Save writes.
func (a Weighted) plain() (tensors []safetensors.Tensor, config []byte, err error) {
	rank, products := 0, make(map[string]*Product, len(a.Adapter.modules))
	for name, p := range a.Adapter.modules {
		products[name] = p.narrow()
		rank = max(rank, products[name].R)
	}
	targets := map[string]bool{}
	for _, name := range a.Adapter.Modules() {
		p := products[name]
		targets[name[strings.LastIndex(name, ".")+1:]] = true
		down := make([]float32, rank*p.K) // [rank, K]
		copy(down, p.A)
		up := make([]float32, p.N*rank) // [N, rank]
		for i := range p.N {
			for j := range p.R {
				up[i*rank+j] = float32(float64(p.B[i*p.R+j]) * p.Scale * a.Weight)
			}
		}
		for _, t := range []struct {
			kind  string
			shape []int
			x     []float32
		}{{"A", []int{rank, p.K}, down}, {"B", []int{p.N, rank}, up}} {
			full, err := safetensors.FloatTensor(
				fmt.Sprintf("base_model.model.%s.lora_%s.weight", name, t.kind), tensor.F32, t.shape, t.x)
			if err != nil {
				return nil, nil, err
			}
			tensors = append(tensors, full)
		}
	}
	config, err = json.Marshal(map[string]any{
		"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "lora_dropout": 0,
		"target_modules": slices.Sorted(maps.Keys(targets)),
	})
	return tensors, config, err
}

// narrow returns a product of the same sum whose rank is at most the smaller side of its weight: p itself, or one with
// the sum in one factor and ones in the other.
func (p *Product) narrow() *Product {
	if p.R <= min(p.N, p.K) {
		return p
	}
	sum := make([]float32, p.N*p.K)
	for i := range p.N {
		for j := range p.K {
			x := 0.0
			for r := range p.R {
				x += float64(float64(p.B[i*p.R+r]) * float64(p.A[r*p.K+j]))
			}
			sum[i*p.K+j] = float32(x)
		}
	}
	ones := func(n int) []float32 {
		x := make([]float32, n*n)
		for i := range n {
			x[i*n+i] = 1
		}
		return x
	}
	if p.N < p.K {
		return &Product{A: sum, B: ones(p.N), R: p.N, N: p.N, K: p.K, Scale: p.Scale}
	}
	return &Product{A: ones(p.K), B: sum, R: p.K, N: p.N, K: p.K, Scale: p.Scale}
}
