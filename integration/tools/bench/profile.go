package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// errNoSamples says that the profiled work got too little time of a processor.
var errNoSamples = errors.New("the profile has no samples; make it longer")

// printShares sorts the samples of a CPU profile by stage and operation.
func printShares(out io.Writer, profile []byte, batch int) error {
	stacks, err := readProfile(profile)
	if err != nil {
		return fmt.Errorf("read profile: %w", err)
	}
	type key struct{ stage, op string }
	counts := map[key]int64{}
	stages := map[string]int64{}
	var all int64
	for _, s := range stacks {
		k := key{classOf(s.functions, stageFunctions), classOf(s.functions, operations)}
		counts[k] += s.count
		stages[k.stage] += s.count
		all += s.count
	}
	if all == 0 {
		return errNoSamples
	}
	fmt.Fprintf(out, "Batch %d, one thread, %d samples:\n\n| stage | operation | share |\n| --- | --- | --- |\n",
		batch, all)
	for _, stage := range slices.SortedFunc(maps.Keys(stages),
		func(a, b string) int { return cmp.Compare(stages[b], stages[a]) }) {
		fmt.Fprintf(out, "| %s | all | %.1f %% |\n", stage, 100*float64(stages[stage])/float64(all))
		var ops []key
		for k := range counts {
			if k.stage == stage {
				ops = append(ops, k)
			}
		}
		slices.SortFunc(ops, func(a, b key) int {
			return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a.op, b.op))
		})
		for _, k := range ops {
			fmt.Fprintf(out, "| | %s | %.1f %% |\n", k.op, 100*float64(counts[k])/float64(all))
		}
	}
	fmt.Fprintln(out)
	return nil
}

// class is functions, by a part of their names, and what their time counts as. The innermost
// function of a stack that is listed decides.
type class struct{ function, name string }

var (
	operations = []class{
		{"cpu.(*Epilogue).", "epilogues: activation, gate, residual"},
		{"cpu.(*linearTask).", "matrix products"},
		{"cpu.(*attentionTask).", "attention"},
		{"cpu.(*convTask).", "convolutions"},
		{"cpu.(*patchTask).", "convolutions"},
		{"cpu.padImage", "convolutions"},
		{"cpu.(*CPU).Conv2D", "convolutions"},
		{"cpu.(*rowTask).layerNorm", "layer norm and modulation"},
		{"cpu.(*rowTask).rope", "rotary positions"},
		{"cpu.(*rowTask).", "RMS and L2 norms, elements"},
		{"cpu.(*CPU).DoubledConv2D", "convolutions"},
		{"flow.", "solver, guidance, noise"},
		{"tokenizer.(*Tokenizer).", "tokenizer"},
		{"runtime.gcBgMarkWorker", "garbage collection"},
	}
	stageFunctions = []class{
		{".(*Model).Encode", "encode"},
		{"main.(*painter).denoise", "denoise"},
		{".(*Model).Velocity", "denoise"},
		{".(*Model).Decode", "decode"},
	}
)

// classOf is what a stack counts as.
func classOf(functions []string, classes []class) string {
	for _, f := range functions {
		for _, c := range classes {
			if strings.Contains(f, c.function) {
				return c.name
			}
		}
	}
	return "other"
}

// stack is samples of one call stack, innermost function first.
type stack struct {
	functions []string
	count     int64
}

// readProfile reads what runtime/pprof writes: a gzipped message of pprof's profile.proto.
// Fields used: Profile.sample 2, location 4, function 5, string_table 6; Sample.location_id
// 1, value 2; Location.id 1, line 4; Line.function_id 1; Function.id 1, name 2.
func readProfile(data []byte) ([]stack, error) {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	if data, err = io.ReadAll(z); err != nil {
		return nil, err
	}
	p := profile{lines: map[uint64][]uint64{}, names: map[uint64]uint64{}}
	if err := eachField(data, p.field); err != nil {
		return nil, err
	}
	stacks := make([]stack, 0, len(p.samples))
	for _, s := range p.samples {
		if len(s.values) == 0 {
			return nil, errors.New("a sample without a value")
		}
		out := stack{count: int64(s.values[0])}
		for _, location := range s.locations {
			for _, f := range p.lines[location] {
				name := p.names[f]
				if name >= uint64(len(p.texts)) {
					return nil, fmt.Errorf("name %d of %d", name, len(p.texts))
				}
				out.functions = append(out.functions, p.texts[name])
			}
		}
		stacks = append(stacks, out)
	}
	return stacks, nil
}

// profile is what is read of a profile; things refer to each other by number.
type profile struct {
	samples []struct{ locations, values []uint64 }
	lines   map[uint64][]uint64 // functions of a location, the innermost first
	names   map[uint64]uint64   // of functions: places in texts
	texts   []string
}

// field takes one field of the profile.
func (p *profile) field(field int, _ uint64, body []byte) error {
	switch field {
	case 2:
		var s struct{ locations, values []uint64 }
		err := eachField(body, func(field int, v uint64, body []byte) error {
			switch field {
			case 1:
				return appendNumbers(&s.locations, v, body)
			case 2:
				return appendNumbers(&s.values, v, body)
			}
			return nil
		})
		p.samples = append(p.samples, s)
		return err
	case 4:
		var id uint64
		var in []uint64
		err := eachField(body, func(field int, v uint64, body []byte) error {
			switch field {
			case 1:
				id = v
			case 4:
				return eachField(body, func(field int, v uint64, _ []byte) error {
					if field == 1 {
						in = append(in, v)
					}
					return nil
				})
			}
			return nil
		})
		p.lines[id] = in
		return err
	case 5:
		var id, name uint64
		err := eachField(body, func(field int, v uint64, _ []byte) error {
			switch field {
			case 1:
				id = v
			case 2:
				name = v
			}
			return nil
		})
		p.names[id] = name
		return err
	case 6:
		p.texts = append(p.texts, string(body))
	}
	return nil
}

// errProtobuf is returned for bytes that are no protocol buffer.
var errProtobuf = errors.New("malformed message")

// eachField calls f for every field of a protocol buffer: v is the value of a number,
// body that of a string or message.
func eachField(data []byte, f func(field int, v uint64, body []byte) error) error {
	for len(data) > 0 {
		tag, n := binary.Uvarint(data)
		if n <= 0 {
			return errProtobuf
		}
		data = data[n:]
		v, n := binary.Uvarint(data)
		if n <= 0 {
			return errProtobuf
		}
		data = data[n:]
		var body []byte
		switch tag % 8 {
		case 0:
		case 2:
			if v > uint64(len(data)) {
				return errProtobuf
			}
			body, data = data[:v], data[v:]
		default:
			return errProtobuf
		}
		if err := f(int(tag/8), v, body); err != nil {
			return err
		}
	}
	return nil
}

// appendNumbers appends a field of repeated numbers, packed (body) or single.
func appendNumbers(to *[]uint64, single uint64, body []byte) error {
	if body == nil {
		*to = append(*to, single)
		return nil
	}
	for len(body) > 0 {
		v, n := binary.Uvarint(body)
		if n <= 0 {
			return errProtobuf
		}
		*to, body = append(*to, v), body[n:]
	}
	return nil
}
