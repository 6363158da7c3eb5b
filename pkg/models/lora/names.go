package lora

import (
	_ "embed" // names.json
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/meander-rl/meander/pkg/models/safetensors"
)

//go:generate cp names.json ../../client/python/meander/data/lora_names.json

// namesFile is all that is known of the names in files of adapters. The Python client reads the same file.
//
//go:embed names.json
var namesFile []byte

// rules are namesFile: how trainers name what they save.
type rules struct {
	// Suffixes map the ending of the name of a tensor to what it is of its module: A, B or alpha.
	Suffixes map[string]string `json:"suffixes"`
	// Prefixes and Wrappers are taken off the names of modules: what comes before the network's own name, and what
	// stands between its parts.
	Prefixes []string `json:"prefixes"`
	Wrappers []string `json:"wrappers"`
	// Flat begin names whose dots are underscores.
	Flat []string `json:"flat"`
	// Refused are patterns of names with the reason why none is read.
	Refused [][2]string `json:"refused"`
	// UsedFields of adapter_config.json change results, FieldsWithoutEffect do not, each for its reason.
	UsedFields          []string          `json:"used_fields"`
	FieldsWithoutEffect map[string]string `json:"fields_without_effect"`
	// PlainInits are the values of init_lora_weights that leave the weights below the adapter unchanged. With the
	// others (pissa, olora, loftq, corda, lora_ga) the adapter holds a part of those weights, which PEFT subtracts.
	PlainInits []string `json:"plain_inits"`
	// UnsupportedPattern matches forms of Python's regular expressions that Go does not have, or reads in another way.
	UnsupportedPattern string `json:"unsupported_pattern"`
	// Originals map names of the publishers' own code to those of diffusers, which has what is one module there as
	// several, one after the other; * stands for the same in all. Swapped ones have the halves of their rows in the
	// other order, where the model has the module that comes third.
	Originals [][]string `json:"originals"`
	Swapped   [][]string `json:"swapped"`

	unsupported *regexp.Regexp
	refused     []*regexp.Regexp
}

var names = sync.OnceValue(func() *rules {
	r := &rules{}
	if err := json.Unmarshal(namesFile, r); err != nil {
		panic("lora: names.json: " + err.Error())
	}
	r.unsupported = regexp.MustCompile(r.UnsupportedPattern)
	for _, of := range r.Refused {
		r.refused = append(r.refused, regexp.MustCompile(of[0]))
	}
	return r
})

// split returns the module of a tensor, what the tensor is of it, and what was taken off the module's name. why says
// for what reason it is refused.
func (r *rules) split(tensor string) (module, kind string, off []string, why string) {
	module = tensor
	for _, w := range r.Wrappers { // of parts of the network, and of the two factors
		if m := strings.ReplaceAll(module, w, ""); m != module {
			module, off = m, append(off, w)
		}
	}
	for suffix, of := range r.Suffixes {
		if m, ok := strings.CutSuffix(module, suffix); ok {
			module, kind = m, of
			break
		}
	}
	for again := true; again; {
		again = false
		for _, p := range r.Prefixes {
			if m, ok := strings.CutPrefix(module, p); ok {
				module, off, again = m, append(off, p), true
			}
		}
	}
	for i, of := range r.refused {
		if of.MatchString(tensor) || of.MatchString(module) {
			return module, kind, off, r.Refused[i][1]
		}
	}
	if kind == "" || module == "" {
		return module, kind, off, "no tensor of a LoRA"
	}
	return module, kind, off, ""
}

// resolver finds the modules of a model that the name of a module in a file means.
type resolver struct {
	Table
	flat map[string]string // names without dots
}

func (t Table) resolver() *resolver {
	r := &resolver{t, make(map[string]string, len(t))}
	for name := range t {
		r.flat[flatten(name)] = name
	}
	return r
}

func flatten(name string) string { return strings.ReplaceAll(name, ".", "_") }

// resolve returns the modules that a name means, in the order of their rows, and whether the halves of the rows have to
// be swapped; none if the model has none.
func (r *resolver) resolve(name string) (modules []string, swap bool) {
	known := func(n string) (string, bool) { _, ok := r.Table[n]; return n, ok }
	spell := func(n string) string { return n }
	for _, prefix := range names().Flat {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			name, spell = rest, flatten
			known = func(n string) (string, bool) { n, ok := r.flat[n]; return n, ok }
			break
		}
	}
	if own, ok := known(name); ok {
		return []string{own}, false
	}
	all := func(targets []string, star string) (found []string) {
		for _, target := range targets {
			own, ok := known(strings.Replace(spell(target), "*", star, 1))
			if !ok {
				return nil
			}
			found = append(found, own)
		}
		return found
	}
	for _, entry := range names().Swapped {
		if _, ok := r.Table[entry[2]]; ok && spell(entry[0]) == name {
			return all(entry[1:2], ""), true
		}
	}
	for _, entry := range names().Originals {
		before, after, starred := strings.Cut(spell(entry[0]), "*")
		star, isBefore := strings.CutPrefix(name, before)
		star, isAfter := strings.CutSuffix(star, after)
		if !isBefore || !isAfter || (star != "") != starred {
			continue
		}
		if found := all(entry[1:], star); found != nil {
			return found, false
		}
	}
	return nil, false
}

// divide returns the changes of modules that are one in the file, by the names of the model.
func (p *Product) divide(modules []string, swap bool, t Table) (map[string]*Product, error) {
	rows := 0
	for _, m := range modules {
		rows += t[m][0]
		if t[m][1] != p.K {
			return nil, fmt.Errorf("changes a weight of %d x %d, here %d x %d", p.N, p.K, t[m][0], t[m][1])
		}
	}
	if rows != p.N || swap && p.N%2 != 0 {
		return nil, fmt.Errorf("changes a weight of %d x %d, here %d x %d", p.N, p.K, rows, p.K)
	}
	b := p.B
	if swap {
		b = slices.Concat(p.B[len(p.B)/2:], p.B[:len(p.B)/2])
	}
	out := make(map[string]*Product, len(modules))
	for _, m := range modules {
		n := t[m][0]
		out[m] = &Product{A: p.A, B: b[:n*p.R], R: p.R, N: n, K: p.K, Scale: p.Scale}
		b = b[n*p.R:]
	}
	return out, nil
}

// refusals collects the names of tensors that are not read, by the reason.
type refusals map[string][]string

func (r refusals) errors() (faults []error) {
	for _, why := range slices.Sorted(maps.Keys(r)) {
		faults = append(faults, fmt.Errorf("%d tensors: %s: %s", len(r[why]), safetensors.ListNames(r[why]), why))
	}
	return faults
}
