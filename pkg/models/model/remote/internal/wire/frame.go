// Package wire is what a worker of package remote and its client send each other: frames with a header and tensors,
// and the digest of an encoded prompt. It opens no connection.
//
// A frame is a u32 header length, a u64 body length, the header and the body; numbers are little-endian. The header
// is a msgpack map, the body the bytes of its tensors in C order.
package wire

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"

	"github.com/vmihailenco/msgpack/v5"
)

// Protocol is the version that both sides must speak.
const Protocol = 2

// Bounds of a frame in bytes. FirstBody bounds bodies until the worker has said its own bound.
const (
	MaxHeader = 1 << 20
	FirstBody = 1 << 30
)

// Element types of tensors.
const (
	F32 = "f32"
	U8  = "u8"
)

// readPiece is how much memory a body gets before more of it has arrived: a false length costs no memory.
const readPiece = 16 << 20

// ErrFrame is wrapped by the errors for bytes that are no frame: the connection cannot be used any more.
var ErrFrame = errors.New("not a frame of the protocol")

// Tensor is a named array in C order, little-endian.
type Tensor struct {
	Name  string
	DType string // F32 or U8
	Shape []int
	Data  []byte
	// Rest are more bytes to send behind Data; none in a tensor that was read.
	Rest [][]byte
}

// size returns the bytes of a tensor to send.
func (t Tensor) size() int {
	n := len(t.Data)
	for _, b := range t.Rest {
		n += len(b)
	}
	return n
}

// Message is a request, with Call and Args, or an answer with its ID: Result, or Error.
type Message struct {
	ID      uint64
	Call    string
	Args    msgpack.RawMessage
	Result  msgpack.RawMessage
	Error   *Fault
	Tensors []Tensor
}

// Fault is an error that a worker answers with.
type Fault struct {
	Class   string `msgpack:"class"`
	Message string `msgpack:"message"`
	// Conditions are the digests of those that the worker lacks, of class ClassCond.
	Conditions []string `msgpack:"conditions,omitempty"`
}

func (f *Fault) Error() string { return f.Class + ": " + f.Message }

// Classes of faults.
const (
	ClassPrompt   = "prompt"    // a text that the model cannot take
	ClassLatents  = "latents"   // latents that are no image
	ClassCond     = "condition" // the worker does not have a condition (any more)
	ClassHandle   = "handle"    // the worker does not have the encoded prompt (any more)
	ClassWeights  = "weights"   // weights that are not loaded, or do not fit
	ClassMemory   = "memory"    // the device has too little memory for the call
	ClassConfig   = "config"    // a setting: trying again does not help
	ClassWorker   = "worker"    // a fault of the worker itself
	ClassProtocol = "protocol"  // an unknown call or argument
)

// place says where a tensor lies in a body.
type place struct {
	Name  string `msgpack:"name"`
	DType string `msgpack:"dtype"`
	Shape []int  `msgpack:"shape"`
	At    int    `msgpack:"at"`
	Bytes int    `msgpack:"bytes"`
}

// header is the header of a frame.
type header struct {
	ID      uint64             `msgpack:"id"`
	Call    string             `msgpack:"call"`
	Args    msgpack.RawMessage `msgpack:"args"`
	Result  msgpack.RawMessage `msgpack:"result"`
	Error   *Fault             `msgpack:"error"`
	Tensors []place            `msgpack:"tensors"`
}

// Encode returns v as msgpack.
func Encode(v any) (msgpack.RawMessage, error) {
	var b bytes.Buffer
	e := msgpack.NewEncoder(&b)
	e.UseCompactInts(true)
	err := e.Encode(v)
	return b.Bytes(), err
}

// Write sends a message. Its tensors are not copied.
func Write(w io.Writer, m *Message) error {
	places, at := make([]place, len(m.Tensors)), 0
	for i, t := range m.Tensors {
		places[i] = place{t.Name, t.DType, t.Shape, at, t.size()}
		if t.Shape == nil {
			places[i].Shape = []int{}
		}
		at += t.size()
	}
	fields := map[string]any{"id": m.ID, "tensors": places}
	switch {
	case m.Call != "":
		fields["call"], fields["args"] = m.Call, m.Args
	case m.Error != nil:
		fields["error"] = m.Error
	default:
		fields["result"] = m.Result
	}
	head, err := Encode(fields)
	if err != nil {
		return fmt.Errorf("encode the header of %s: %w", m.Call, err)
	}
	if len(head) > MaxHeader {
		return fmt.Errorf("header of %s: %d bytes; must be at most %d", m.Call, len(head), MaxHeader)
	}
	frame := binary.LittleEndian.AppendUint32(make([]byte, 0, 12+len(head)), uint32(len(head)))
	frame = binary.LittleEndian.AppendUint64(frame, uint64(at))
	parts := net.Buffers{append(frame, head...)}
	for _, t := range m.Tensors {
		for _, b := range append([][]byte{t.Data}, t.Rest...) {
			if len(b) > 0 {
				parts = append(parts, b)
			}
		}
	}
	_, err = parts.WriteTo(w)
	return err
}

// Read receives a message with a body of at most maxBody bytes. The tensors share the memory of the body. An error
// for anything but a whole, valid frame is an ErrFrame or that of r; the connection cannot be used any more.
func Read(r io.Reader, maxBody int) (*Message, error) {
	var fixed [12]byte
	if _, err := io.ReadFull(r, fixed[:]); err != nil {
		return nil, err
	}
	n, size := binary.LittleEndian.Uint32(fixed[:]), binary.LittleEndian.Uint64(fixed[4:])
	if n > MaxHeader {
		return nil, fmt.Errorf("%w: header of %d bytes; must be at most %d", ErrFrame, n, MaxHeader)
	}
	if size > uint64(maxBody) {
		return nil, fmt.Errorf("%w: body of %d bytes; must be at most %d", ErrFrame, size, maxBody)
	}
	head, err := readAll(r, int(n))
	if err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	var h header
	d := msgpack.NewDecoder(bytes.NewReader(head))
	if err := d.Decode(&h); err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrFrame, err)
	}
	tensors, err := locate(h.Tensors, int(size))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	body, err := readAll(r, int(size))
	if err != nil {
		return nil, fmt.Errorf("body: %w", err)
	}
	for i, p := range h.Tensors {
		tensors[i].Data = body[p.At : p.At+p.Bytes : p.At+p.Bytes]
	}
	return &Message{h.ID, h.Call, h.Args, h.Result, h.Error, tensors}, nil
}

// leastRecycled is the least memory that is kept for other frames.
const leastRecycled = 64 << 10

// recycled has memory of bodies that are no longer used, as *[]byte: to clear new memory
// takes as long as to read into it.
var recycled sync.Pool

// Recycle keeps the memory of a body, or of one tensor that was read, for another frame. Nobody may use it afterwards.
func Recycle(b []byte) {
	if cap(b) >= leastRecycled {
		recycled.Put(&b)
	}
}

// memory returns an empty slice for n bytes.
func memory(n int) []byte {
	if n >= leastRecycled {
		if b, ok := recycled.Get().(*[]byte); ok && cap(*b) >= n {
			return (*b)[:0]
		}
	}
	return make([]byte, 0, min(n, readPiece))
}

// readAll reads n bytes, in memory that grows as they arrive. An end before that is io.ErrUnexpectedEOF.
func readAll(r io.Reader, n int) ([]byte, error) {
	b := memory(n)
	for len(b) < n {
		more := min(n-len(b), readPiece)
		b = slices.Grow(b, more)
		got, err := io.ReadFull(r, b[len(b):len(b)+more])
		b = b[:len(b)+got]
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
	}
	return b, nil
}

// locate checks that tensors lie inside a body of size bytes, do not overlap, and have the bytes of their shapes. It
// returns them without data.
func locate(places []place, size int) ([]Tensor, error) {
	tensors := make([]Tensor, len(places))
	for i, p := range places {
		elements, err := Elements(p.Shape)
		if err != nil {
			return nil, fmt.Errorf("tensor %.40q: %w", p.Name, err)
		}
		width := 0
		switch p.DType {
		case F32:
			width = 4
		case U8:
			width = 1
		default:
			return nil, fmt.Errorf("tensor %.40q: dtype: %.40q; must be %s or %s", p.Name, p.DType, F32, U8)
		}
		if p.Bytes != width*elements {
			return nil, fmt.Errorf("tensor %.40q: %d bytes; must be %d", p.Name, p.Bytes, width*elements)
		}
		if p.At < 0 || p.At > size || p.Bytes > size-p.At {
			return nil, fmt.Errorf("tensor %.40q: %d bytes at %d; must be within the body of %d", p.Name, p.Bytes, p.At,
				size)
		}
		tensors[i] = Tensor{Name: p.Name, DType: p.DType, Shape: p.Shape}
	}
	order := slices.SortedFunc(slices.Values(places), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.Bytes, b.Bytes)) // an empty one before what begins there
	})
	for i := 1; i < len(order); i++ {
		if before := order[i-1]; before.At+before.Bytes > order[i].At {
			return nil, fmt.Errorf("tensor %.40q: overlaps %.40q", order[i].Name, before.Name)
		}
	}
	return tensors, nil
}

// maxElements bounds the elements of a tensor: no body has more bytes.
const maxElements = 1 << 40

// Elements returns the number of elements of a shape.
func Elements(shape []int) (int, error) {
	n := 1
	if len(shape) > 8 {
		return 0, fmt.Errorf("%d dimensions; must be at most 8", len(shape))
	}
	for _, d := range shape {
		if d < 0 || d > maxElements || d > 0 && n > maxElements/d {
			return 0, fmt.Errorf("shape: %v; must have at most %d elements", shape, maxElements)
		}
		n *= d
	}
	return n, nil
}
