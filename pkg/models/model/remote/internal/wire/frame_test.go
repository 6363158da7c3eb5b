package wire_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
)

const bound = 1 << 16

// frameOf returns a frame with a header of fields and a body of size bytes.
func frameOf(t testing.TB, fields map[string]any, size int) []byte {
	t.Helper()
	head, err := msgpack.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(head)))
	b = binary.LittleEndian.AppendUint64(b, uint64(size))
	return append(append(b, head...), make([]byte, size)...)
}

func at(name, dtype string, at, bytes int, shape ...int) map[string]any {
	return map[string]any{"name": name, "dtype": dtype, "shape": shape, "at": at, "bytes": bytes}
}

func TestRead_WhatWasWritten(t *testing.T) {
	args, err := wire.Encode(wire.SizeArgs{Frames: 1, Height: 64, Width: 96})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []*wire.Message{
		{ID: 1 << 40, Call: wire.CallDecode, Args: args, Tensors: []wire.Tensor{
			{Name: "x", DType: wire.F32, Shape: []int{2, 1}, Data: []byte{1, 2, 3, 4, 5, 6, 7, 8}},
			{Name: "none", DType: wire.U8, Shape: []int{0}, Data: []byte{}},
			{Name: "media", DType: wire.U8, Shape: []int{3}, Data: []byte{7, 8, 9}},
		}},
		{ID: 2, Result: args, Tensors: []wire.Tensor{}},
		{ID: 3, Error: &wire.Fault{Class: wire.ClassPrompt, Message: "600 tokens"}, Tensors: []wire.Tensor{}},
	} {
		var b bytes.Buffer
		if err := wire.Write(&b, want); err != nil {
			t.Fatal(err)
		}
		got, err := wire.Read(&b, bound)
		if err != nil {
			t.Fatal(err)
		}
		if want.Args == nil {
			want.Args, got.Args = nil, nil
		}
		if !reflect.DeepEqual(got, want) && fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("read %+v, written %+v", got, want)
		}
		if b.Len() > 0 {
			t.Errorf("%d bytes are left", b.Len())
		}
	}
}

// A tensor that is sent in pieces is read as one, also into memory of a frame before.
func TestRead_Pieces(t *testing.T) {
	for i := range byte(3) {
		piece := bytes.Repeat([]byte{i + 1}, 1<<16)
		var b bytes.Buffer
		if err := wire.Write(&b, &wire.Message{Call: wire.CallVelocity, Tensors: []wire.Tensor{
			{Name: "x", DType: wire.U8, Shape: []int{2<<16 + 1}, Data: piece[:1], Rest: [][]byte{piece, nil, piece}},
			{Name: "y", DType: wire.U8, Shape: []int{1}, Data: []byte{9}},
		}}); err != nil {
			t.Fatal(err)
		}
		got, err := wire.Read(&b, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		if x := got.Tensors[0].Data; !bytes.Equal(x, bytes.Repeat(piece[:1], 2<<16+1)) || got.Tensors[1].Data[0] != 9 {
			t.Errorf("frame %d: %d bytes, %d behind", i, len(x), got.Tensors[1].Data[0])
		}
		wire.Recycle(got.Tensors[0].Data)
	}
}

func TestRead_Refuses(t *testing.T) {
	tensors := func(list ...map[string]any) map[string]any { return map[string]any{"id": 1, "tensors": list} }
	long := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(nil, wire.MaxHeader+1), 0)
	large := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(nil, 1), bound+1)
	for _, tt := range []struct {
		frame []byte
		says  string
	}{
		{long, "header of 1048577 bytes; must be at most 1048576"},
		{large, "body of 65537 bytes; must be at most 65536"},
		{append(binary.LittleEndian.AppendUint64([]byte{1, 0, 0, 0}, 0), 0xc1), "header"},
		{frameOf(t, tensors(at("x", "f16", 0, 4, 2)), 4), `dtype: "f16"; must be f32 or u8`},
		{frameOf(t, tensors(at("x", "f32", 0, 4, 2)), 8), "4 bytes; must be 8"},
		{frameOf(t, tensors(at("x", "f32", 4, 8, 2)), 8), "8 bytes at 4; must be within the body of 8"},
		{frameOf(t, tensors(at("x", "f32", -4, 8, 2)), 8), "at -4"},
		{frameOf(t, tensors(at("x", "u8", 0, 8, 8), at("y", "u8", 7, 1, 1)), 8), `"y": overlaps "x"`},
		{frameOf(t, tensors(at("x", "u8", 0, 8, -8)), 8), "shape: [-8]"},
		{frameOf(t, tensors(at("x", "f32", 0, 0, 1<<33, 1<<31)), 8), "shape"},
		{frameOf(t, tensors(at("x", "u8", 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)), 8), "9 dimensions"},
	} {
		_, err := wire.Read(bytes.NewReader(tt.frame), bound)
		if !errors.Is(err, wire.ErrFrame) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%v; want an ErrFrame with %q", err, tt.says)
		}
	}
	whole := frameOf(t, tensors(at("x", "u8", 0, 8, 8)), 8)
	for n := range whole {
		_, err := wire.Read(bytes.NewReader(whole[:n]), bound)
		if n > 0 && !errors.Is(err, io.ErrUnexpectedEOF) || err == nil {
			t.Errorf("%d of %d bytes: %v; want an unexpected end", n, len(whole), err)
		}
	}
}

// A length that is no more than said costs no memory.
func TestRead_FalseLength(t *testing.T) {
	frame := frameOf(t, map[string]any{"id": 1}, 0)
	binary.LittleEndian.PutUint64(frame[4:], wire.FirstBody)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := wire.Read(bytes.NewReader(frame), wire.FirstBody)
	runtime.ReadMemStats(&after)
	if !errors.Is(err, io.ErrUnexpectedEOF) || after.TotalAlloc-before.TotalAlloc > 64<<20 {
		t.Errorf("%v, %d bytes allocated", err, after.TotalAlloc-before.TotalAlloc)
	}
}

func TestWrite_LongHeader(t *testing.T) {
	args, err := wire.Encode(wire.EncodeArgs{Prompts: [][]string{{strings.Repeat("x", wire.MaxHeader)}}})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := wire.Write(&b, &wire.Message{Call: wire.CallEncode, Args: args}); err == nil || b.Len() > 0 {
		t.Errorf("%v, %d bytes sent; want a refusal before anything is sent", err, b.Len())
	}
}

// The handle is that of the protocol's own words: name, 0, dimensions, data.
func TestHandle(t *testing.T) {
	got := wire.Handle([]wire.Tensor{
		{Name: "prompt_embeds", Shape: []int{1, 2}, Data: []byte{0, 0, 128, 63, 0, 0, 0, 64}},
		{Name: "pooled", Shape: []int{1}, Data: []byte{0, 0, 0, 0}},
	})
	// python: sha256(b"prompt_embeds\0" + pack("<III2f", 2, 1, 2, 1, 2) + b"pooled\0" + pack("<IIf", 1, 1, 0))
	if want := "da85a2ae5488e77f205bf582761c9558ab2bbf0e60f6e8d4ef0576d514280485"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(frameOf(f, map[string]any{"id": 1, "result": map[string]any{}}, 0))
	f.Add(frameOf(f, map[string]any{"id": 1, "tensors": []any{at("x", "f32", 0, 8, 2)}}, 8))
	f.Add(append(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(nil, 1<<16), 0),
		bytes.Repeat([]byte{0x91}, 1<<16)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := wire.Read(bytes.NewReader(b), bound)
		if err != nil {
			return
		}
		for _, x := range m.Tensors {
			n, err := wire.Elements(x.Shape)
			if err != nil || len(x.Data) != n && len(x.Data) != 4*n {
				t.Errorf("%s: %v in %d bytes, %v", x.Name, x.Shape, len(x.Data), err)
			}
		}
	})
}
