package dataset

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
)

// Choice says which records are used. Its rules are applied in the order of the fields.
type Choice struct {
	// Shuffle orders records by a hash of this seed and their index; nil keeps the order of the file. The order of
	// two records does not depend on other settings.
	Shuffle *int64
	// Offset skips records, Limit bounds how many follow; Limit 0: all.
	Offset, Limit int
	// BatchSize is the number of records in a batch, in order; the last batch may be smaller. 0: one batch of all.
	BatchSize int
	// Batches is how many whole batches to make. Records repeat in passes as often as needed, and a batch may end
	// in the next pass. 0: one pass. With Shuffle each pass has its own order: seed plus the number of the pass.
	Batches int
	// Spares is how many other records each record gets as replacements: those that would come next.
	Spares int
	// Shard of Shards, from 0, is the part of this machine: every Shards-th batch if BatchSize is set, else every
	// Shards-th record. Shards 0: all.
	Shard, Shards int
}

// Validate joins all faults of a choice; each names its option and the rule. Choose calls it before it reads a record.
func (c Choice) Validate() error {
	var faults []error
	checkLeast := func(field string, n, low int) {
		if n < low {
			faults = append(faults, fault(field, n, fmt.Sprintf("must be at least %d", low)))
		}
	}
	checkLeast("offset", c.Offset, 0)
	checkLeast("limit", c.Limit, 0)
	checkLeast("batch size", c.BatchSize, 0)
	checkLeast("batches", c.Batches, 0)
	checkLeast("spares", c.Spares, 0)
	if c.Batches > 0 && c.BatchSize == 0 {
		faults = append(faults, fault("batches", c.Batches, "must be 0 without a batch size"))
	}
	if c.Batches > 0 && c.BatchSize > MaxRecords/c.Batches {
		faults = append(faults, fault("batches", c.Batches, fmt.Sprintf("must be at most %d records in all",
			MaxRecords)))
	}
	if c.Shards < 0 || c.Shard < 0 || c.Shard >= max(c.Shards, 1) {
		faults = append(faults, fault("shard", bare(fmt.Sprintf("%d/%d", c.Shard, c.Shards)),
			"must be I/N with I from 0 to N-1"))
	}
	return errors.Join(faults...)
}

// Batch is the records of one batch.
type Batch struct {
	// Number counts the batches of all shards, from 0.
	Number  int
	Records []Record
}

// Report counts what a Choice did, in order.
type Report struct {
	// Records is how many came in: with Partial not all, since the others could not be chosen.
	Records int
	Partial bool
	// Duplicates counts records with an equal earlier one.
	Duplicates int
	// Chosen is how many are left after offset and limit, repeated to fill a given number of batches, in Batches; both
	// are before sharding.
	Chosen, Batches int
}

// pieceSize is how many records a batch without a size has at most.
const pieceSize = 1024

// Choose applies a choice to the records of a file and yields the batches of its shard. Publishing from a file goes
// through it. It reads no further than it must and, in the order of the file, without repeats and spares, holds one
// batch at a time; else it keeps those records alone that may be chosen. Without a batch size the one batch comes in
// pieces of up to 1024 records. Without records there are no batches. The report says what was left out, and is whole
// at the end. An invalid choice, spares for a single record, and errors of the records are errors, and end it.
func Choose(records iter.Seq2[Record, error], c Choice, report *Report) iter.Seq2[Batch, error] {
	return func(yield func(Batch, error) bool) {
		*report = Report{}
		if err := c.Validate(); err != nil {
			yield(Batch{}, err)
			return
		}
		b, size := Batch{}, cmp.Or(c.BatchSize, pieceSize)
		for r, err := range c.chosen(count(records, report), report) {
			if err != nil {
				yield(Batch{}, err)
				return
			}
			mine := report.Chosen // without a batch size every Shards-th record is of the shard, else every such batch
			switch {
			case c.BatchSize == 0:
				report.Batches = 1
			case report.Chosen%size == 0:
				b.Number, report.Batches = report.Batches, report.Batches+1
				fallthrough
			default:
				mine = b.Number
			}
			report.Chosen++
			if mine%max(c.Shards, 1) != c.Shard {
				continue
			}
			if b.Records = append(b.Records, r); len(b.Records) == size {
				if !yield(b, nil) {
					return
				}
				b.Records = nil
			}
		}
		if len(b.Records) > 0 {
			yield(b, nil)
		}
	}
}

// chosen yields the records that are left after offset and limit, repeated and with spares as told.
func (c Choice) chosen(records iter.Seq2[Record, error], report *Report) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		if c.Shuffle == nil && c.Batches == 0 && c.Spares == 0 {
			n := 0
			for r, err := range records {
				if n++; err != nil || n > c.Offset {
					if !yield(r, err) {
						return
					}
				}
				if report.Partial = n == c.most(); report.Partial {
					return
				}
			}
			return
		}
		kept, err := c.keep(records, report)
		if err == nil {
			kept, err = c.repeat(kept[min(c.Offset, len(kept)):])
		}
		if err != nil {
			yield(Record{}, err)
			return
		}
		for _, r := range kept {
			if !yield(r, nil) {
				return
			}
		}
	}
}

// count yields the records, and counts them and duplicates. These are known by 8 bytes of a hash: of a million records
// two have the same by chance once in 10^7 files, and the memory of all stays small.
func count(records iter.Seq2[Record, error], report *Report) iter.Seq2[Record, error] {
	type start [8]byte
	return func(yield func(Record, error) bool) {
		seen := map[start]struct{}{}
		for r, err := range records {
			if err != nil {
				yield(r, err)
				return
			}
			report.Records++
			if prompt, ok := r.Prompt(); ok {
				whole := r.identity(prompt)
				id := start(whole[:])
				if _, twice := seen[id]; twice {
					report.Duplicates++
				}
				seen[id] = struct{}{}
			}
			if !yield(r, nil) {
				return
			}
		}
	}
}

// most returns how many records, in order, decide what is chosen; 0: all.
func (c Choice) most() int {
	n := c.Limit
	if c.Batches > 0 {
		// One more than there are places, so that a record never is its own spare.
		if places := c.Batches*c.BatchSize*(1+c.Spares) + 1; n == 0 || places < n {
			n = places
		}
	}
	if n == 0 {
		return 0
	}
	return c.Offset + n
}

// keep returns the records that decide what is chosen, in their order. In the order of the file it reads no more than
// these, and says so in the report; of a shuffled file it holds no more at a time.
func (c Choice) keep(records iter.Seq2[Record, error], report *Report) ([]Record, error) {
	most := c.most()
	var kept []Record
	for r, err := range records {
		if err != nil {
			return nil, err
		}
		kept = append(kept, r)
		if most == 0 {
			continue
		}
		if c.Shuffle == nil && len(kept) == most {
			report.Partial = true
			break
		}
		if len(kept) == 2*most {
			shuffle(kept, *c.Shuffle)
			clear(kept[most:])
			kept = kept[:most]
		}
	}
	if c.Shuffle != nil {
		shuffle(kept, *c.Shuffle)
	}
	if most > 0 {
		kept = kept[:min(most, len(kept))]
	}
	return kept, nil
}

// repeat returns as many records as the batches need, pass by pass over the file, each pass
// shuffled anew, and gives each its spares: other records, to replace it if it fails. Repeated
// records are copies. Spares for a single record are an error.
func (c Choice) repeat(records []Record) ([]Record, error) {
	n := len(records)
	if c.Batches > 0 {
		n = c.Batches * c.BatchSize
	}
	if len(records) == 0 || n == len(records) && c.Spares == 0 {
		return records, nil
	}
	if c.Spares > 0 && len(records) == 1 {
		return nil, fault("spares", c.Spares, "must be 0 with a single record: there is no other")
	}
	pass := slices.Clone(records)
	at := func(i int) Record {
		if epoch := i / len(records); i%len(records) == 0 && epoch > 0 && c.Shuffle != nil {
			shuffle(pass, *c.Shuffle+int64(epoch))
		}
		r := pass[i%len(records)]
		r.Epoch, r.Fields = i/len(records), cloneValue(r.Fields).(map[string]any)
		return r
	}
	out := make([]Record, n)
	for i := range out {
		out[i] = at(i)
	}
	next := n
	for i := range out {
		for len(out[i].Spares) < c.Spares {
			r := at(next)
			if next++; r.Index != out[i].Index {
				out[i].Spares = append(out[i].Spares, r)
			}
		}
	}
	return out, nil
}

// cloneValue copies a JSON value of a record with all maps and lists in it, so that a change of a
// repeated record leaves the others.
func cloneValue(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, x := range v {
			out[k] = cloneValue(x)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, x := range v {
			out[i] = cloneValue(x)
		}
		return out
	}
	return v
}

// shuffle sorts records by the SHA-256 of seed and index, each as 8 bytes, little-endian: the same
// order on every machine.
func shuffle(records []Record, seed int64) {
	keys := make(map[int][sha256.Size]byte, len(records))
	for _, r := range records {
		var b [16]byte
		binary.LittleEndian.PutUint64(b[:], uint64(seed))
		binary.LittleEndian.PutUint64(b[8:], uint64(r.Index))
		keys[r.Index] = sha256.Sum256(b[:])
	}
	slices.SortFunc(records, func(a, b Record) int {
		x, y := keys[a.Index], keys[b.Index]
		return bytes.Compare(x[:], y[:])
	})
}

// identity returns a hash of what makes two records duplicates: prompt, negative prompt, ground
// truths and messages. Choose counts records with equal ones.
func (r *Record) identity(prompt string) [sha256.Size]byte {
	h := sha256.New()
	write := func(there bool, s string) {
		if there {
			fmt.Fprintf(h, "%d:%s", len(s), s)
		}
		h.Write([]byte{0})
	}
	write(true, prompt)
	negative, ok := r.Fields["negative_prompt"].(string)
	write(ok, negative)
	truth, _ := json.Marshal(r.GroundTruth) // JSON values
	write(r.GroundTruth != nil, string(truth))
	said, _ := json.Marshal(r.Messages) // maps of texts
	write(r.Messages != nil, string(said))
	rewards, _ := r.Fields["reward"].([]any) // in prompts of this project ground truths may be there
	for _, v := range rewards {
		spec, _ := v.(map[string]any)
		if spec[truthField] != nil {
			truth, _ := json.Marshal(spec[truthField])
			write(true, string(truth))
		}
	}
	return [sha256.Size]byte(h.Sum(nil))
}
