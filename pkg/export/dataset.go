package export

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// IndexFile is the name of the index in the folder of a dataset.
const IndexFile = "index.json"

// ErrChanged says that a file is not as the index says.
var ErrChanged = errors.New("changed since the export")

// format is how samples become a file.
type format struct {
	end    string
	create func(path string) (writer, error)
}

// writer writes the samples of one file.
type writer interface {
	// add returns about how many bytes the sample takes. errUnreadable: it is left out.
	add(s *sample) (int64, error)
	Close() error
}

// errUnreadable says that a part of a sample is not what its event says.
var errUnreadable = errors.New("unreadable")

var formats = map[string]format{
	"webdataset":  {".tar", newTar},
	"parquet":     {".parquet", newParquet},
	"safetensors": {".safetensors", newTensorFile},
}

// Datasets returns the names of the formats of datasets, sorted.
func Datasets() []string { return slices.Sorted(maps.Keys(formats)) }

// DatasetOptions say what is written, and where.
type DatasetOptions struct {
	// Format is one of Datasets.
	Format string
	// Folder is made if it does not exist. It must be empty, or have an export of the same run with the same options.
	Folder string
	// Bytes is the size from which on a file gets no further group; at least 1.
	Bytes int64
	// Latents has the stored states of images written, too. They are most of the bytes.
	Latents bool
	// MP4 has videos written as mp4, too, which takes ffmpeg; safetensors has none.
	MP4 bool
	// Written is called after each file.
	Written func(Shard)
}

// Shard is one file.
type Shard struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
	Bytes  int64  `json:"bytes"`
	// Groups and Samples are those in the file, of samples of several stages each stage. LeftOut are those of its
	// groups that are not: they did not complete, or parts of them are no longer stored.
	Groups  int `json:"groups"`
	Samples int `json:"samples"`
	LeftOut int `json:"left_out"`
	// LastSeq is the sequence of the last group's result in its stream, LastUID the group.
	LastSeq uint64      `json:"last_seq"`
	LastUID schemas.UID `json:"last_uid"`
}

// Index is the content of index.json.
type Index struct {
	Run        schemas.Run `json:"run"`
	Format     string      `json:"format"`
	ShardBytes int64       `json:"shard_bytes"`
	Latents    bool        `json:"latents"`
	MP4        bool        `json:"mp4,omitempty"`
	Shards     []Shard     `json:"shards"`
}

// Totals returns the sums of all files.
func (x *Index) Totals() (t Shard) {
	for _, s := range x.Shards {
		t.Bytes, t.Groups, t.Samples, t.LeftOut = t.Bytes+s.Bytes, t.Groups+s.Groups, t.Samples+s.Samples,
			t.LeftOut+s.LeftOut
	}
	return t
}

// WriteDataset writes the groups of a run that have closed and are not in the folder yet. ErrBegun and ErrChanged say
// why it cannot go on with what an earlier one has written.
func WriteDataset(ctx context.Context, b *bus.Bus, run schemas.Run, o DatasetOptions) (*Index, error) {
	f, ok := formats[o.Format]
	if !ok {
		return nil, fmt.Errorf("format: %q; must be one of %v", o.Format, Datasets())
	}
	if o.MP4 && o.Format == "safetensors" {
		return nil, fmt.Errorf("mp4: set; must be absent for %s, which has pixels", o.Format)
	}
	x := &Index{
		Run: run, Format: o.Format, ShardBytes: max(1, o.Bytes), Latents: o.Latents, MP4: o.MP4, Shards: []Shard{},
	}
	if err := os.MkdirAll(o.Folder, 0o755); err != nil {
		return nil, err
	}
	if err := x.resume(o.Folder); err != nil {
		return nil, err
	}
	e := &export{bus: b, run: run, options: o, format: f, index: x}
	err := e.writeGroups(ctx)
	if err == nil {
		err = e.finish()
	}
	if err != nil {
		return x, fmt.Errorf("export %s: %w", run, errors.Join(err, e.discard()))
	}
	return x, nil
}

// resume takes over the whole files of an earlier WriteDataset.
func (x *Index) resume(folder string) error {
	before, err := readIndex(folder)
	switch {
	case errors.Is(err, os.ErrNotExist):
		if files, err := os.ReadDir(folder); err != nil || len(files) > 0 {
			return errors.Join(err, fmt.Errorf("%w: %s has files, and no %s; name an empty folder", ErrBegun, folder,
				IndexFile))
		}
		return x.save(folder) // before any file: what is begun can be told from another's files
	case err != nil:
		return err
	case before.Run != x.Run || before.Format != x.Format || before.ShardBytes != x.ShardBytes ||
		before.Latents != x.Latents || before.MP4 != x.MP4:
		return fmt.Errorf("%w: run %s as %s, files of %d bytes, latents %t, mp4 %t; name another folder, or the same "+
			"settings", ErrBegun, before.Run, before.Format, before.ShardBytes, before.Latents, before.MP4)
	}
	x.Shards = before.Shards
	return x.check(folder)
}

// readIndex reads the index of a folder.
func readIndex(folder string) (*Index, error) {
	x := &Index{}
	if err := loadJSON(filepath.Join(folder, IndexFile), x); err != nil {
		return nil, err
	}
	for _, s := range x.Shards {
		if !filepath.IsLocal(s.File) {
			return nil, fmt.Errorf("%s: file %q; must be in the folder", filepath.Join(folder, IndexFile), s.File)
		}
	}
	return x, nil
}

// save writes the index in one step.
func (x *Index) save(folder string) error { return saveJSON(filepath.Join(folder, IndexFile), x) }

// check compares the files with what the index says of them.
func (x *Index) check(folder string) error {
	for _, s := range x.Shards {
		name := filepath.Join(folder, s.File)
		digest, size, err := digestOf(name)
		if err != nil {
			return err
		}
		if size != s.Bytes || digest != s.SHA256 {
			return fmt.Errorf("%s: %w", name, ErrChanged)
		}
	}
	return nil
}

// digestOf returns the SHA-256 and the size of a file.
func digestOf(name string) (digest string, size int64, err error) {
	f, err := os.Open(name)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = f.Close() }() // read-only
	h := sha256.New()
	size, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), size, err
}

// CheckDataset compares all files of a folder with its index, which it returns. The error is ErrChanged, or of the file
// system.
func CheckDataset(folder string) (*Index, error) {
	x, err := readIndex(folder)
	if err != nil {
		return nil, err
	}
	return x, x.check(folder)
}

// export is the state of one WriteDataset.
type export struct {
	bus     *bus.Bus
	run     schemas.Run
	options DatasetOptions
	format  format
	index   *Index

	open    writer // nil: no file is open
	current Shard
	written int64 // bytes of samples in the open file
}

// writeGroups writes the groups that have closed since the last file.
func (e *export) writeGroups(ctx context.Context) error {
	read, after := bus.ReadOptions{}, (*Shard)(nil)
	if n := len(e.index.Shards); n > 0 {
		after = &e.index.Shards[n-1]
		read.FromSeq = after.LastSeq
	}
	for m, err := range e.bus.Read(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(e.run, "*")},
		read) {
		if err != nil {
			return err
		}
		var a schemas.Advantage
		if bus.Fits(m, &a) != nil {
			continue // not a result; the group's true one will replace it
		}
		if after != nil && m.Seq == after.LastSeq {
			if a.UID != after.LastUID {
				return fmt.Errorf("%w: of a run with that name in another store; name another folder", ErrBegun)
			}
			after = nil
			continue
		}
		if after != nil { // what closed since then may be gone, too
			break
		}
		if err := e.writeGroup(ctx, &a, m.Seq); err != nil {
			return fmt.Errorf("group %s: %w", a.UID, err)
		}
	}
	if after != nil {
		return fmt.Errorf("%w: group %s is no longer stored, so what closed since cannot be told; name another folder",
			ErrBegun, after.LastUID)
	}
	return nil
}

// writeGroup adds a group to the open file, and closes it when it is full.
func (e *export) writeGroup(ctx context.Context, a *schemas.Advantage, seq uint64) error {
	if e.open == nil {
		e.current, e.written = Shard{File: fmt.Sprintf("%05d%s", len(e.index.Shards), e.format.end)}, 0
		var err error
		if e.open, err = e.format.create(filepath.Join(e.options.Folder, e.current.File+PartEnd)); err != nil {
			return err
		}
	}
	leftOut, err := eachSample(ctx, e.bus, a, e.options.Latents, func(s *sample) error {
		var err error
		if video := s.media[schemas.KindVideo]; e.options.MP4 && video != nil {
			if s.mp4, err = media.MP4(ctx, video, s.media[schemas.KindAudio]); err != nil {
				return err
			}
		}
		n, err := e.open.add(s)
		if err == nil {
			e.current.Samples++
			e.written += n
		}
		return err
	})
	if err != nil {
		return err
	}
	e.current.Groups++
	e.current.LeftOut += leftOut
	e.current.LastSeq, e.current.LastUID = seq, a.UID
	if e.written >= e.index.ShardBytes {
		return e.finish()
	}
	return nil
}

// discard removes the open file.
func (e *export) discard() error {
	if e.open == nil {
		return nil
	}
	_ = e.open.Close() // it is removed
	return os.Remove(filepath.Join(e.options.Folder, e.current.File+PartEnd))
}

// finish closes the open file and enters it in the index.
func (e *export) finish() error {
	if e.open == nil {
		return nil
	}
	w, name := e.open, filepath.Join(e.options.Folder, e.current.File)
	if err := w.Close(); err != nil {
		return err
	}
	e.open = nil
	var err error
	if e.current.SHA256, e.current.Bytes, err = digestOf(name + PartEnd); err != nil {
		return err
	}
	if err := os.Rename(name+PartEnd, name); err != nil {
		return err
	}
	e.index.Shards = append(e.index.Shards, e.current)
	if e.options.Written != nil {
		e.options.Written(e.current)
	}
	return e.index.save(e.options.Folder)
}

// CardFile is the name of the card in a data set of the Hugging Face Hub.
const CardFile = "README.md"

// Card returns the card of a dataset that goes to the Hugging Face Hub: what it is, for the Hub, and what its samples
// were made with, for people. version is that of the program; s may be nil.
func Card(x *Index, s *view.Settings, version string) string {
	t, b := x.Totals(), &strings.Builder{}
	fmt.Fprintf(b, "---\npretty_name: meander run %s\ntags:\n- meander\n- reinforcement-learning\n- rollouts\n", x.Run)
	if source := settingOf(s, "source"); source != "" {
		name, _, _ := strings.Cut(source, "@")
		fmt.Fprintf(b, "base_model: %s\n", name)
	}
	if x.Format == "parquet" {
		b.WriteString("configs:\n- config_name: default\n  data_files: \"*.parquet\"\n")
	}
	fmt.Fprintf(b, "---\n\n# Run %s\n\nRollouts with rewards and advantages, made by "+
		"[meander](https://github.com/meander-rl/meander) %s: %d samples in %d groups, as %s.\n", x.Run, version,
		t.Samples, t.Groups, x.Format)
	if t.LeftOut > 0 {
		fmt.Fprintf(b, "%d samples of these groups are left out: they did not complete, or are no longer stored.\n",
			t.LeftOut)
	}
	if s == nil {
		return b.String()
	}
	part := ""
	for _, x := range s.List {
		if x.Part != part {
			part = x.Part
			fmt.Fprintf(b, "\n## %s\n\n| setting | value |\n|---|---|\n", part)
		}
		fmt.Fprintf(b, "| %s | %s |\n", x.Name, cell(x.Value))
	}
	if s.Again != nil && s.Again.Command != "" {
		fmt.Fprintf(b, "\n## Again\n\n```sh\n%s\n```\n", strings.TrimSpace(s.Again.Command))
	}
	return b.String()
}

// settingOf returns the value of a setting that all samples have; empty: there is none.
func settingOf(s *view.Settings, name string) string {
	if s != nil {
		for _, x := range s.List {
			if x.Name == name && !x.Varies {
				return x.Value
			}
		}
	}
	return ""
}

// cell is a text as one cell of a table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "\n", " ", "<", "&lt;").Replace(text)
}
