package results

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/pkg/sheet"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// WriteJSON writes one JSON object per line: each group, then the summary as the value of summary.
func (r *Run) WriteJSON(w io.Writer) error { return writeLines(w, r.Groups, r.Summary) }

// writeLines writes one JSON object per line: each group, then {"summary": ...}. The results of a run and of a pass
// share it. It fails if the writer does.
func writeLines[G any](w io.Writer, groups []G, summary any) error {
	enc := json.NewEncoder(w)
	for _, g := range groups {
		if err := enc.Encode(g); err != nil {
			return err
		}
	}
	return enc.Encode(map[string]any{"summary": summary})
}

// writeFile makes the file results.jsonl in a folder, with what write writes. The error is about the file, or of write.
func writeFile(dir string, write func(io.Writer) error) error {
	f, err := os.Create(filepath.Join(dir, "results.jsonl"))
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := write(f); err != nil {
		f.Close()
		return fmt.Errorf("write results: %w", err)
	}
	return f.Close()
}

func makeFolder(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	return nil
}

// Write makes the folder dir with the images as PNG, the videos as animated PNG and, where ffmpeg is found, as mp4, a
// contact sheet for each group with images, and results.jsonl. It notes their paths in r. It fails if an image cannot
// be read or a file not be written; files that are written by then stay.
func (r *Run) Write(ctx context.Context, b *bus.Bus, dir string) error {
	if err := makeFolder(dir); err != nil {
		return err
	}
	r.Summary.Out = dir
	if err := r.Load(ctx, b); err != nil {
		return err
	}
	for _, g := range r.Groups {
		images, err := g.writeMedia(ctx, b, dir)
		if err == nil {
			err = r.writeMP4(ctx, g)
		}
		if err != nil {
			return err
		}
		drawn, err := g.drawSheet(ctx, b, images)
		if err != nil {
			return err
		}
		if drawn == nil {
			continue
		}
		path := filepath.Join(dir, string(g.UID)+"-sheet.png")
		if err := os.WriteFile(path, drawn, 0o644); err != nil {
			return fmt.Errorf("write contact sheet: %w", err)
		}
		if r.Summary.Sheet == "" {
			r.Summary.Sheet = path
		}
	}
	return writeFile(dir, r.WriteJSON)
}

// writeMP4 writes the videos of a group, which are written, as mp4 beside them, with their sound. What ffmpeg cannot do
// is noted: a run does not fail for it.
func (r *Run) writeMP4(ctx context.Context, g *Group) error {
	for i := range g.Members {
		m := &g.Members[i]
		if m.Video == "" || r.Summary.NoMP4 != "" {
			continue
		}
		video, err := os.ReadFile(m.Video)
		var sound []byte
		if err == nil && m.Audio != "" {
			sound, err = os.ReadFile(m.Audio)
		}
		if err != nil {
			return err
		}
		data, err := media.MP4(ctx, video, sound)
		if err != nil {
			r.Summary.NoMP4 = err.Error()
			return ctx.Err()
		}
		if err := os.WriteFile(strings.TrimSuffix(m.Video, filepath.Ext(m.Video))+".mp4", data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// drawSheet draws the contact sheet of a group as PNG, the best sample first, from its images or frames by sample
// index; nil if it has none.
func (g *Group) drawSheet(ctx context.Context, b *bus.Bus, images map[int64]media.Media) ([]byte, error) {
	var tiles []sheet.Tile
	for _, m := range g.Best() {
		if m.Roll != nil {
			return g.drawRolledSheet(ctx, b)
		}
		if sample, ok := images[m.SampleIndex]; ok {
			tiles = append(tiles, tileOf(&m, sample))
		}
	}
	if len(tiles) == 0 {
		return nil, nil
	}
	given, err := g.givenTiles(ctx, b)
	if err != nil {
		return nil, err
	}
	return sheet.Draw(g.Prompt, append(given, tiles...))
}

// givenTiles returns what the network was given beside the prompt, as the first tiles of a contact sheet.
func (g *Group) givenTiles(ctx context.Context, b *bus.Bus) (tiles []sheet.Tile, err error) {
	for i := range g.Members {
		t := g.Members[i].Trajectory()
		if t == nil || len(t.Conditions) == 0 {
			continue
		}
		for _, c := range t.Conditions {
			if c.Stage != "" {
				continue // each sample has its own
			}
			var m media.Media
			file, err := client.New(b).Condition(ctx, c)
			if err == nil {
				m, err = media.DecodeInput(file)
			}
			if err != nil {
				return nil, fmt.Errorf("condition %s of %s: %w", c.Name, g.UID, err)
			}
			tiles = append(tiles, sheet.Tile{
				Media: m.Spaced(sheet.StripFrames), Given: true, Caption: "condition " + c.Name,
			})
		}
		return tiles, nil // they are those of the prompt, the same for all
	}
	return nil, nil
}

// tileOf returns the sample with its reward, reading and advantage as a tile of a contact sheet.
func tileOf(m *view.Member, sample media.Media) sheet.Tile {
	t := sheet.Tile{
		Media:   sample,
		Caption: fmt.Sprintf("#%d  r %s  %s", m.SampleIndex, Number(m.Reward, "%.3f"), m.Read()),
		Note:    "A " + Number(m.Advantage, "%+.3f"),
	}
	if m.Advantage != nil {
		t.Tone = *m.Advantage
	}
	return t
}

// Number formats a value; "-" if there is none.
func Number(v *float64, format string) string {
	if v == nil {
		return "-"
	}
	if math.Abs(*v) >= 1e9 { // %f writes all digits
		return fmt.Sprintf("%.4g", *v)
	}
	return fmt.Sprintf(format, *v)
}

// writeMedia writes the files of a group's samples into dir, notes their paths in the members and returns by sample
// index what a contact sheet shows of them. It fails if one cannot be read, decoded or written.
func (g *Group) writeMedia(ctx context.Context, b *bus.Bus, dir string) (map[int64]media.Media, error) {
	shown := map[int64]media.Media{}
	for i := range g.Members {
		m := &g.Members[i]
		t := m.Trajectory()
		if t == nil {
			continue
		}
		files, err := WriteMedia(ctx, b, t, dir, g.UID)
		if err != nil {
			return nil, err
		}
		m.Image, m.Video = files[schemas.KindImage].Path, files[schemas.KindVideo].Path
		m.Audio = files[schemas.KindAudio].Path
		of := t.Shown()
		if of == nil {
			continue
		}
		sample, err := sampling.DecodeMedium(of, files[of.Kind].Data)
		if err != nil {
			return nil, fmt.Errorf("%s of %s sample %d: %w", of.Kind, g.UID, m.SampleIndex, err)
		}
		shown[m.SampleIndex] = sample.Spaced(sheet.StripFrames)
	}
	return shown, nil
}

// File is a file that was written.
type File struct {
	Path string
	Data []byte
}

// WriteMedia writes the files of a sample of a group into dir, and returns them by their kind.
func WriteMedia(ctx context.Context, b *bus.Bus, t *schemas.Trajectory, dir string, uid schemas.UID,
) (map[string]File, error) {
	files := map[string]File{}
	for i := range t.Media {
		m := &t.Media[i]
		data, err := client.New(b).Medium(ctx, t, m.Kind)
		path := filepath.Join(dir, fmt.Sprintf("%s-%03d.%s", uid, t.SampleIndex, m.Format))
		if err == nil {
			err = os.WriteFile(path, data, 0o644)
		}
		if err != nil {
			return nil, fmt.Errorf("%s of %s sample %d: %w", m.Kind, uid, t.SampleIndex, err)
		}
		files[m.Kind] = File{path, data}
	}
	return files, nil
}

// Load fetches those tensors of the run's texts that are in the object store; Collect leaves them there because they
// are large. It fails if one cannot be fetched, for example because it was removed.
func (r *Run) Load(ctx context.Context, b *bus.Bus) error {
	for _, g := range r.Groups {
		for i := range g.Members {
			m := &g.Members[i]
			if m.Text == nil || m.Trajectory().Text.IDs == nil || m.Text.IDs != nil {
				continue
			}
			x, err := view.LoadText(ctx, b, m.Trajectory())
			if err != nil {
				return err
			}
			m.Text = x
		}
	}
	return nil
}

// WriteLatents writes every kept state of the run to a safetensors file. For each group and step there is an F32
// tensor "<uid>.latents.<step>" of shape [n, S, C], the states before that step of the group's n completed samples; the
// number of steps stands for the final state. An I64 tensor "<uid>.sample_index" [n] says which samples these are.
// leftOut is how many samples did not complete and are not in the file.
func (r *Run) WriteLatents(ctx context.Context, b *bus.Bus, path string) (leftOut int, err error) {
	var out []safetensors.Tensor
	for _, g := range r.Groups {
		tensors, n, err := groupLatents(ctx, b, g)
		if err != nil {
			return 0, fmt.Errorf("save latents of %s: %w", g.UID, err)
		}
		out, leftOut = append(out, tensors...), leftOut+n
	}
	if err := safetensors.WriteFile(path, out, map[string]string{
		"run":    string(r.Summary.Run),
		"format": "packed [n, S, C], index i is before step i",
	}); err != nil {
		return 0, fmt.Errorf("save latents: %w", err)
	}
	return leftOut, nil
}

// groupLatents returns the tensors of one group, and how many of its samples are left out.
func groupLatents(ctx context.Context, b *bus.Bus, g *Group) (out []safetensors.Tensor, leftOut int, err error) {
	byIndex := map[int64][]float32{}
	var order, shape []int64
	var samples []byte
	n := 0
	for i := range g.Members {
		t := g.Members[i].Trajectory()
		if t == nil || t.StopReason != schemas.StopCompleted {
			leftOut++
			continue
		}
		shape, order = t.LatentsShape, t.LatentStepIndices
		kept, err := client.New(b).Latents(ctx, t)
		if err != nil {
			return nil, 0, err
		}
		for index, x := range kept {
			byIndex[index] = append(byIndex[index], x...)
		}
		n, samples = n+1, binary.LittleEndian.AppendUint64(samples, uint64(t.SampleIndex))
	}
	if n == 0 {
		return nil, leftOut, nil
	}
	for _, index := range order {
		t, err := safetensors.FloatTensor(fmt.Sprintf("%s.latents.%d", g.UID, index), tensor.F32,
			[]int{n, int(shape[0]), int(shape[1])}, byIndex[index])
		if err != nil {
			return nil, 0, err
		}
		out = append(out, t)
	}
	return append(out,
			safetensors.Tensor{
				Name: string(g.UID) + ".sample_index", DType: tensor.I64, Shape: []int{n},
				Data: samples,
			}),
		leftOut, nil
}

// Pass is the result of scoring a run's samples again, beside the run's own. Its JSON is that of meander rescore
// --json.
type Pass struct {
	Groups  []*PassGroup
	Summary PassSummary
}

// PassGroup is a group of a pass.
type PassGroup struct {
	view.GroupResult
	// SourceMean and SourceStd are the run's; null where the run has no result.
	SourceMean *float64     `json:"source_mean"`
	SourceStd  *float64     `json:"source_std"`
	Members    []PassMember `json:"members"`
}

// PassMember is one sample of a PassGroup.
type PassMember struct {
	view.SampleResult
	Scores          []view.Score `json:"scores"`
	SourceStatus    string       `json:"source_status"`
	SourceReward    *float64     `json:"source_reward"`
	SourceAdvantage *float64     `json:"source_advantage"`
}

// PassSummary counts the results of a pass.
type PassSummary struct {
	Run      schemas.Run `json:"run"`
	Source   schemas.Run `json:"source_run"`
	Groups   int         `json:"groups"`
	Complete int         `json:"complete"`
	Samples  int         `json:"samples"`
	Scored   int         `json:"scored"`
	Digest   string      `json:"digest"`
	Seconds  float64     `json:"seconds"`
	Out      string      `json:"out,omitempty"`
}

// ScoredAgain is a group before and after a pass.
type ScoredAgain struct {
	UID    schemas.UID
	Prompt string
	// Before is the result in the run, nil if there is none; After is the result in the pass.
	Before, After *schemas.Advantage
}

// CollectPass reads the rewards that a pass stored for the groups of a run, and joins them with the results of the
// groups before and after the pass. It fails if the server cannot be read.
func CollectPass(ctx context.Context, b *bus.Bus, pass, run schemas.Run, groups []ScoredAgain) (*Pass, error) {
	rewards, err := view.Rewards(ctx, b, pass, "*")
	if err != nil {
		return nil, err
	}
	out := &Pass{Summary: PassSummary{Run: pass, Source: run, Groups: len(groups)}}
	var content digest
	for _, s := range groups {
		if err := content.add("advantage."+string(s.UID), s.After); err != nil {
			return nil, err
		}
		g := s.compare(rewards)
		for _, m := range g.Members {
			if m.Status == schemas.StatusScored {
				out.Summary.Scored++
			}
		}
		out.Summary.Samples += len(g.Members)
		if g.Status == schemas.StatusComplete {
			out.Summary.Complete++
		}
		out.Groups = append(out.Groups, g)
	}
	out.Summary.Digest = content.String()
	return out, nil
}

// compare joins the results of a group before and after the pass, sample by sample. rewards are those of the pass.
func (s *ScoredAgain) compare(rewards map[view.Key]*schemas.Reward) *PassGroup {
	a := s.After
	g := &PassGroup{GroupResult: view.GroupResultOf(a, s.UID, s.Prompt), Members: []PassMember{}}
	before := map[int64]schemas.Member{}
	if s.Before != nil {
		g.SourceMean, g.SourceStd = s.Before.Mean, s.Before.Std
		for _, m := range s.Before.Members {
			before[m.SampleIndex] = m
		}
	}
	for _, m := range a.Members {
		old := before[m.SampleIndex]
		now := view.MemberOf(&m, nil, rewards[view.Key{UID: s.UID, Index: m.SampleIndex}])
		g.Members = append(g.Members, PassMember{
			SampleResult: now.SampleResult, Scores: now.Scores,
			SourceStatus: old.Status, SourceReward: old.Reward, SourceAdvantage: old.Advantage,
		})
	}
	return g
}

// WriteJSON writes one JSON object per line: each group, then the summary as the value of summary.
func (p *Pass) WriteJSON(w io.Writer) error { return writeLines(w, p.Groups, p.Summary) }

// Write makes the file dir/results.jsonl, and notes the folder in p.
func (p *Pass) Write(dir string) error {
	if err := makeFolder(dir); err != nil {
		return err
	}
	p.Summary.Out = dir
	return writeFile(dir, p.WriteJSON)
}
