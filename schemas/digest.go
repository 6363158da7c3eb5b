package schemas

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/zeebo/blake3"
)

// A digest of fields is the BLAKE3 of a text that names what is digested, and of a struct. Which fields enter is said
// by their tag digest: none, and the field is in every digest of its struct; "content", in the content digest, and not
// in the schedule digest, because samples of one group may differ in it; "-", in none. The bytes of a struct are, of
// each field that is set and enters, in the order of the keys on the wire, its name (text) and its value; then an empty
// text. A number 0, an empty text and an empty list are not set, unless null or absence would mean something else; a
// struct is. So a field that comes later changes no digest of events that lack it. The bytes of a value:
//
//	integer     8 bytes, two's complement, little-endian; a bool is 1 or 0
//	float64     8 bytes, its IEEE 754 bits, little-endian
//	float32     4 bytes, its IEEE 754 bits, little-endian
//	text        its length in bytes as an integer, then its UTF-8
//	bytes       its length as an integer, then the bytes
//	list        its length as an integer, then its items
//	map         its length as an integer, then key and value of each, sorted by key
//	tensor      dtype (text), shape (list), digest of its elements (text), wherever they are
//	item that may be null: 1 byte, 0 for null, or 1 and then the value
//
// digester collects the bytes of all fields before it hashes them: fields are short, and a tensor is represented by its
// own digest.
type digester struct {
	fields []byte
	// schedule leaves out what is of the content alone.
	schedule bool
	// tensors are those that have been digested, sums their digests in the same order. Others are digested by SHA-256,
	// as blobs are.
	tensors []*Tensor
	sums    *TensorSums
	err     error
}

// newDigester begins a digest; domain says what is digested and the layout's version.
func newDigester(domain string) *digester {
	d := &digester{fields: make([]byte, 0, 1024)}
	d.addText(domain)
	return d
}

func (d *digester) addInteger(n int64) {
	d.fields = binary.LittleEndian.AppendUint64(d.fields, uint64(n))
}

func (d *digester) addText(s string) {
	d.addInteger(int64(len(s)))
	d.fields = append(d.fields, s...)
}

func (d *digester) finish() [32]byte { return BLAKE3.Sum(d.fields) }

// text returns the digest as events carry it.
func (d *digester) text() string { return BLAKE3.Text(d.finish()) }

var tensorType = reflect.TypeFor[Tensor]()

// addStruct adds the fields of a struct that are set and enter the digest.
func (d *digester) addStruct(v reflect.Value) {
	fields := Fields(v.Type())
	for i := range fields {
		f := &fields[i]
		if f.Digest == DigestNone || d.schedule && f.Digest == DigestContent {
			continue
		}
		if value := f.In(v); value.Kind() == reflect.Struct || f.isSet(value) {
			d.addText(f.Name)
			d.addValue(value)
		}
	}
	d.addText("")
}

// addValue adds a value by its type.
func (d *digester) addValue(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		n := int64(0)
		if v.Bool() {
			n = 1
		}
		d.addInteger(n)
	case reflect.Int64:
		d.addInteger(v.Int())
	case reflect.Uint64:
		d.addInteger(int64(v.Uint()))
	case reflect.Float32:
		d.fields = binary.LittleEndian.AppendUint32(d.fields, math.Float32bits(float32(v.Float())))
	case reflect.Float64:
		d.addInteger(int64(math.Float64bits(v.Float())))
	case reflect.String:
		d.addText(v.String())
	case reflect.Pointer:
		d.addValue(v.Elem())
	case reflect.Slice:
		d.addList(v)
	case reflect.Map:
		m := v.Interface().(map[string]string)
		d.addInteger(int64(len(m)))
		for _, name := range slices.Sorted(maps.Keys(m)) {
			d.addText(name)
			d.addText(m[name])
		}
	case reflect.Struct:
		if v.Type() == tensorType {
			d.addTensor(v.Addr().Interface().(*Tensor))
		} else {
			d.addStruct(v)
		}
	default:
		panic("schemas: no digest of " + v.Type().String()) // a struct of this package is wrong
	}
}

// addList adds the length of a list and each of its items; of pointers whether they are set.
func (d *digester) addList(v reflect.Value) {
	elem := v.Type().Elem().Kind()
	d.addInteger(int64(v.Len()))
	if elem == reflect.Uint8 {
		d.fields = append(d.fields, v.Bytes()...)
		return
	}
	for i := range v.Len() {
		item := v.Index(i)
		if elem == reflect.Pointer {
			if item.IsNil() {
				d.fields = append(d.fields, 0)
				continue
			}
			d.fields = append(d.fields, 1)
		}
		d.addValue(item)
	}
}

// addTensor adds dtype, shape and the digest of the bytes: the sum that is known already, or one that it computes.
func (d *digester) addTensor(t *Tensor) {
	digest := ""
	if i := slices.Index(d.tensors, t); i >= 0 {
		digest = d.sums.Text(i)
	} else {
		sum, err := t.sum(SHA256)
		d.err = errors.Join(d.err, err)
		digest = SHA256.Text(sum)
	}
	d.addText(t.DType)
	d.addInteger(int64(len(t.Shape)))
	for _, n := range t.Shape {
		d.addInteger(n)
	}
	d.addText(digest)
}

// scheduleDigest returns the schedule digest of settings, a pointer to a struct.
func scheduleDigest(domain string, settings any) string {
	d := newDigester(domain)
	d.schedule = true
	d.addStruct(reflect.ValueOf(settings).Elem())
	return d.text()
}

// ComputeScheduleDigest returns the digest over what must be equal in a group so that its samples can be compared: the
// text "meander schedule 1" and Sampling or, of text, "meander text schedule 1" and TextRequest. A condition that a
// stage makes is in it without its ref.
func (e *Request) ComputeScheduleDigest() string {
	if e.Text != nil {
		return scheduleDigest("meander text schedule 1", e.Text)
	}
	s := &e.Sampling
	if slices.ContainsFunc(s.Conditions, func(c Condition) bool { return c.Stage != "" }) {
		s = new(*s) // what a stage makes differs between the samples of a group
		s.Conditions = slices.Clone(s.Conditions)
		for i := range s.Conditions {
			if c := &s.Conditions[i]; c.Stage != "" {
				c.Ref = nil
			}
		}
	}
	return scheduleDigest("meander schedule 1", s)
}

// ComputeScheduleDigest returns the digest of the request, from the settings that the trajectory repeats.
func (e *Trajectory) ComputeScheduleDigest() string {
	r := Request{Sampling: e.Sampling}
	if e.Text != nil {
		r.Text = &e.Text.Settings
	}
	return r.ComputeScheduleDigest()
}

// CheckSchedule refuses a request with a setting that this version does not know, by its name, and one whose fields
// do not give its schedule digest.
func (e *Request) CheckSchedule() error {
	return checkSchedule(&e.Sampling, e.ScheduleDigest, e.ComputeScheduleDigest())
}

// CheckSchedule is that of a request.
func (e *Trajectory) CheckSchedule() error {
	return checkSchedule(&e.Sampling, e.ScheduleDigest, e.ComputeScheduleDigest())
}

func checkSchedule(s *Sampling, stored, computed string) error {
	if err := s.CheckKnown(); err != nil || stored == computed {
		return err
	}
	return fmt.Errorf("schedule_digest: stored %.23s, the fields give %.23s", stored, computed)
}

// ErrNoContent is returned by ContentDigest for an event that has no content of its own.
var ErrNoContent = errors.New("event has no content digest")

// ContentDigest returns the digest of what a rollout computed, not of where and
// when: two runs with the same seed, prompts and weights give equal digests, whatever
// their run id, retries, batch packing or number of replicas. Left out are the run,
// stream sequences, times and durations, attempts, instance and backend names, how
// tensors travelled (inline, parts or blob), checkpoints, and caller's metadata.
//
// It covers the text "meander <type>", such as "meander step/1", and the event. It is defined for a Step, Tokens,
// Trajectory, Reward, Advantage and Batch; other events give ErrNoContent. A digest of a tensor that is not legal is an
// error.
func ContentDigest(e Event) ([32]byte, error) {
	switch e := e.(type) {
	case StepEvent:
		sums, err := SumTensors(e)
		if err != nil {
			return [32]byte{}, err
		}
		return ContentDigestOf(e, sums), nil
	case *Trajectory, *Reward, *Advantage, *Batch:
		d := newDigester("meander " + e.Type())
		d.addStruct(reflect.ValueOf(e).Elem())
		return d.finish(), d.err
	}
	return [32]byte{}, fmt.Errorf("%w: %s", ErrNoContent, e.Type())
}

// ContentDigestOf is ContentDigest of an event whose tensors have been digested.
func ContentDigestOf(e StepEvent, sums *TensorSums) [32]byte {
	d := newDigester("meander " + e.Type())
	d.tensors, d.sums = e.Tensors(), sums
	d.addStruct(reflect.ValueOf(e).Elem())
	return d.finish()
}

// TensorSums are the digests of the bytes of an event's tensors by BLAKE3, in the order of its Tensors. They are made
// once for all digests that tensors are in.
type TensorSums struct{ list [][32]byte }

// SumTensors digests the tensors of an event. A digest in the place of one that is not legal, or by another algorithm,
// is an error: such a tensor must be loaded first.
func SumTensors(e StepEvent) (*TensorSums, error) {
	tensors := e.Tensors()
	sums := &TensorSums{make([][32]byte, len(tensors))}
	for i, t := range tensors {
		var err error
		if sums.list[i], err = t.sum(BLAKE3); err != nil {
			return nil, fmt.Errorf("tensor %d of %d: %w", i+1, len(tensors), err)
		}
	}
	return sums, nil
}

// Text returns the digest of tensor i as events carry it.
func (s *TensorSums) Text(i int) string { return BLAKE3.Text(s.list[i]) }

// CheckpointSum returns the digest of the checkpoint; zeros if there is none.
func (e *Step) CheckpointSum(sums *TensorSums) (sum [32]byte) {
	if e.Checkpoint != nil {
		sum = sums.list[len(e.Latents)]
	}
	return sum
}

// sum returns the digest of the tensor's bytes by h, computed from its data or taken from its reference.
func (t *Tensor) sum(h Hash) ([32]byte, error) {
	switch {
	case t.Ref != nil:
		return h.sumOf("tensor.ref.digest", t.Ref.Digest)
	case t.Parts != nil:
		return h.sumOf("tensor.parts.digest", t.Parts.Digest)
	}
	return h.Sum(t.Data), nil
}

// StepsDigest returns the value of Trajectory.ContentDigest: the digest of the text "meander steps 1" and the number of
// the steps (integer), then the 32 bytes of each step's content digest, in step order.
func StepsDigest(steps [][32]byte) string {
	d := newDigester("meander steps 1")
	d.addInteger(int64(len(steps)))
	for i := range steps {
		d.fields = append(d.fields, steps[i][:]...)
	}
	return d.text()
}

// PayloadDigest returns the digest by which trajectories name their steps. It is taken over
// the bytes of an encoded event in which the content of each byte string (msgpack's bin) is replaced by its own
// digest by the same algorithm, 32 bytes; code and length before it stay. So a program that has the digests of a step's
// tensors need not hash them again, and still a change of any byte is seen. Bytes that Precheck refuses are an error.
func PayloadDigest(data []byte) (string, error) {
	var bins []span
	if err := precheck(&walker{data: data, bins: &bins}); err != nil {
		return "", err
	}
	return payloadDigest(data, bins, func(i int) [32]byte { return BLAKE3.Sum(data[bins[i].start:bins[i].end]) }), nil
}

// AppendStep is AppendEncode of a step, or of tokens, and the payload digest of what it is encoded to. sums are its
// TensorSums.
func AppendStep(dst []byte, e StepEvent, sums *TensorSums) (data []byte, digest string, err error) {
	bins := make([]span, 0, len(sums.list))
	if data, err = appendEncode(dst, e, &bins); err != nil {
		return nil, "", err
	}
	inline := make([]int, 0, len(sums.list)) // tensors that are byte strings of the event
	for i, t := range e.Tensors() {
		if len(t.Data) > 0 {
			inline = append(inline, i)
		}
	}
	sum := func(i int) [32]byte { return sums.list[inline[i]] }
	return data, payloadDigest(data[len(dst):], bins, sum), nil
}

// payloadDigest returns the payload digest of an encoded event, given where its byte strings are. sum returns the
// digest of byte string i.
func payloadDigest(data []byte, bins []span, sum func(i int) [32]byte) string {
	folded, at := make([]byte, 0, 2048), 0
	for i, b := range bins {
		own := sum(i)
		folded = append(append(folded, data[at:b.start]...), own[:]...)
		at = b.end
	}
	return BLAKE3.Text(BLAKE3.Sum(append(folded, data[at:]...)))
}

// Hash is the algorithm of a digest, as the text of the digest names it before its 64 lower-case hex digits.
type Hash string

const (
	// SHA256 has no name: stores of objects and of weights name files so.
	SHA256 Hash = ""
	// BLAKE3 is the hash of what events say: it takes half the time for tensors from 8 KiB on, with AVX2.
	BLAKE3 Hash = "blake3:"
)

// HashOf returns the algorithm that a digest names.
func HashOf(digest string) Hash {
	if strings.HasPrefix(digest, string(BLAKE3)) {
		return BLAKE3
	}
	return SHA256
}

// Sum returns the digest of data.
func (h Hash) Sum(data []byte) [32]byte {
	if h == BLAKE3 {
		return blake3.Sum256(data)
	}
	return sha256.Sum256(data)
}

// Text returns a digest as events carry it.
func (h Hash) Text(sum [32]byte) string {
	return string(hex.AppendEncode(append(make([]byte, 0, 72), h...), sum[:]))
}

// HasDigest reports whether data has the digest, by the algorithm that it names.
func HasDigest(data []byte, digest string) bool {
	h := HashOf(digest)
	return h.Text(h.Sum(data)) == digest
}

// sumOf decodes a digest by h that an event carries as text; field is for the error.
func (h Hash) sumOf(field, s string) (sum [32]byte, err error) {
	if !h.isDigest(s) {
		return sum, fmt.Errorf("%s: %s; must be %s", field, quote(s), h.rule())
	}
	_, err = hex.Decode(sum[:], []byte(s[len(h):]))
	return sum, err
}

// isDigest reports whether s is a digest by the algorithm as events carry it.
func (h Hash) isDigest(s string) bool {
	digits, named := strings.CutPrefix(s, string(h))
	return named && len(digits) == 64 && strings.Trim(digits, "0123456789abcdef") == ""
}

// rule describes the digests of the algorithm.
func (h Hash) rule() string {
	if h == BLAKE3 {
		return "blake3: and 64 lower-case hex digits"
	}
	return "a sha-256 of 64 lower-case hex digits"
}
