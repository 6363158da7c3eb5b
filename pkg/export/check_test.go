package export_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// eventFile is an event as a file of an export.
func eventFile(t *testing.T, stream string, seq uint64, e schemas.Keyed) file {
	t.Helper()
	return file{
		fmt.Sprintf("%s/%010d-%s.msgpack", stream, seq, schemas.StoredSubject(e.Subject())),
		bustest.Encode(t, e),
	}
}

// What is no valid event of its subject is refused by its name and cause, by all who read an archive, and before
// anything is written.
func TestCheck_invalid(t *testing.T) {
	t.Parallel()
	record := eventFile(t, schemas.StreamGroups, 1, group("r", "", 1))
	made := eventFile(t, schemas.StreamTrajectories, 1, madeAt("r", 5, 1))
	reward := func(change func(r *schemas.Reward)) file {
		r, _ := scored("r", "", 5, 1, 1)
		r.Status, r.Error, r.Reward = schemas.StatusScored, "", new(1.0)
		change(r)
		return eventFile(t, schemas.StreamRewards, 1, r)
	}
	result := func(change func(a *schemas.Advantage)) file {
		_, a := scored("r", "", 5, 1, 1)
		change(a)
		return eventFile(t, schemas.StreamAdvantages, 1, a)
	}
	good, scoredOne := result(func(*schemas.Advantage) {}), reward(func(*schemas.Reward) {})
	if n, err := read(pack(t, []file{record, made, scoredOne, good}, true)); n != 4 || err != nil {
		t.Fatalf("valid events: read %d, %v", n, err)
	}
	moved := func(f file, old, with string) file { return file{strings.Replace(f.name, old, with, 1), f.data} }
	newer := file{good.name, bytes.Replace(good.data, []byte("\xa1v\x01"), []byte("\xa1v\x09"), 1)}
	for name, c := range map[string]struct {
		bad  file
		want string
	}{
		"garbage": {file{good.name, []byte("garbage")}, "decode advantage/1"},
		"NaN": {result(func(a *schemas.Advantage) {
			a.Members[0].Status, a.Members[0].Reward, a.Members[0].Advantage = schemas.StatusScored, new(1.0),
				new(math.NaN())
		}), "advantage: NaN; must be finite"},
		"Inf":              {result(func(a *schemas.Advantage) { a.Mean = new(math.Inf(1)) }), "mean: +Inf; must be finite"},
		"NaN reward":       {reward(func(r *schemas.Reward) { *r.Reward = math.NaN() }), "reward: NaN; must be between -1e+30 and 1e+30"},
		"newer":            {newer, "v: 9; must be 1"},
		"no stream":        {moved(good, "MDR_ADVANTAGES", "FOO"), `"FOO" is no stream of a run`},
		"another stream":   {moved(good, "MDR_ADVANTAGES", "MDR_STEPS"), "MDR_STEPS has no subject"},
		"another run":      {moved(good, ".r.", ".other."), `is of run "other", and those before it of run "r"`},
		"another subject":  {moved(good, ".r.u", ".r.x"), `an event of "mdr.v1.advantage.r.u"`},
		"a sequence twice": {moved(eventFile(t, schemas.StreamGroups, 1, group("r", "", 1)), ".r.u", ".r.x"), "has sequence 1, as"},
		"a subject twice":  {moved(record, "01-", "02-"), "MDR_GROUPS has one event for each subject"},
		"another sequence": {eventFile(t, schemas.StreamTrajectories, 2, completed("r", "x", 0, schemas.StepRef{Seq: 1, Digest: digest})), "is not in the export"},
	} {
		data := pack(t, []file{record, made, c.bad}, true)
		_, err := read(data)
		_, checked := export.CheckArchive(bytes.NewReader(data), nil)
		p := bustest.New(t)
		_, imported := importRun(t, p.Bus, data, export.ImportOptions{})
		for who, err := range map[string]error{"read": err, "check": checked, "import": imported} {
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.bad.name) {
				t.Errorf("%s, %s: %v; want %q of %q", name, who, err, c.want, c.bad.name)
			}
		}
		if n := p.Info(t, schemas.StreamGroups).State.Msgs; n > 0 {
			t.Errorf("%s: the import has left %d events", name, n)
		}
	}
}

// A step that has another number than its trajectory names it by is refused: the import would find none.
func TestCheck_stepNumber(t *testing.T) {
	t.Parallel()
	step, parts, trajectory := sample(t)
	step.name = strings.Replace(step.name, "0000000001-", "0000000009-", 1)
	if _, err := read(pack(t, []file{step, parts[0], parts[1], trajectory}, true)); err == nil ||
		!strings.Contains(err.Error(), "steps[0]: names sequence 1 of MDR_STEPS") {
		t.Error(err)
	}
}

// The list of digests names each file once; behind the end there are no bytes but the zeros of tar programs.
func TestCheck_ends(t *testing.T) {
	t.Parallel()
	step, parts, trajectory := sample(t)
	whole := []file{step, parts[0], parts[1], trajectory}
	good := pack(t, whole, true)
	if _, err := read(append(bytes.Clone(good), make([]byte, 10_240)...)); err != nil {
		t.Errorf("zeros at the end: %v", err)
	}
	if _, err := read(append(bytes.Clone(good), "garbage"...)); err == nil ||
		!strings.Contains(err.Error(), "bytes follow after its end") {
		t.Errorf("garbage at the end: %v", err)
	}
	sums := unpack(t, good)[4]
	first, rest, _ := strings.Cut(string(sums.data), "\n")
	for list, want := range map[string]string{
		first + "\n" + first + "\n" + rest[strings.Index(rest, "\n")+1:]: "line 2",
		first + "\nnonsense\n" + rest:                                    "line 2: must be a digest",
		rest:                                                             step.name,
	} {
		if _, err := read(pack(t, append(whole[:4:4], file{sums.name, []byte(list)}), false)); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("a list of other lines: %v; want %q", err, want)
		}
	}
}

// What is no archive is told as what it is.
func TestRead_noArchive(t *testing.T) {
	t.Parallel()
	step, parts, trajectory := sample(t)
	whole := pack(t, []file{step, parts[0], parts[1], trajectory}, true)
	damaged := bytes.Clone(whole)
	copy(damaged[bytes.Index(damaged, []byte(parts[0].name)):], "damage")
	for want, data := range map[string][]byte{
		"compressed with gzip; unpack it first":         append([]byte("\x1f\x8b\x08\x00"), whole...),
		"compressed with zstd":                          append([]byte("\x28\xb5\x2f\xfd"), whole...),
		"no tar file; must be one that":                 []byte("a few words"),
		"read export: no tar file":                      bytes.Repeat([]byte("many words "), 1000),
		"damaged after \"" + step.name + "\": what fol": damaged,
	} {
		if _, err := read(data); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	if _, err := read(whole[:700]); err == nil || !strings.Contains(err.Error(), "it was cut off") {
		t.Errorf("half of the first file: %v", err)
	}
}

// An archive has as many bytes of events and blobs for who writes it as for who reads it.
func TestCheck_bytes(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p, _, _ := pass(t)
	wrote, err := export.WriteArchive(t.Context(), p.Bus, "pass", &out)
	if err != nil {
		t.Fatal(err)
	}
	read, err := export.CheckArchive(&out, nil)
	if err != nil || read.Bytes != wrote.Bytes || read.SourceRun != "made" || wrote.SourceRun != "made" {
		t.Errorf("wrote %+v, read %+v, %v", wrote, read, err)
	}
}

// A prompt that the services refuse is in the store, and so in the archive: who reads it is told, and it comes back.
func TestCheck_refusedPrompt(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	publish(t, p.Bus, group("r", "", 1))
	for i := range 12 {
		if _, err := p.PublishPrompt(t.Context(), "r", fmt.Append(nil, "garbage ", i), nil); err != nil {
			t.Fatal(err)
		}
	}
	data := archived(t, p.Bus, "r")
	s, err := export.CheckArchive(bytes.NewReader(data), nil)
	if err != nil || s.Refused != 12 || len(s.Notes) != 11 ||
		!strings.Contains(s.Notes[0], "0000000001-mdr.v1.prompt.r.msgpack") || s.Notes[10] != "and 2 more" {
		t.Fatalf("%+v, %v", s, err)
	}
	done, err := importRun(t, bustest.New(t).Bus, data, export.ImportOptions{})
	if err != nil || done.Stored != 13 || done.Refused != 12 || len(done.Notes) != 11 {
		t.Errorf("%+v, %v", done, err)
	}
}

// A message that is no event of its stream, which no service reads, is left out of an archive by name, so that the
// archive can be read; a blob that is gone is named.
func TestWrite_LeavesOut(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	publish(t, p.Bus, group("r", "", 1))
	p.Forge(t, schemas.TrajectorySubject("r", "u", 3, schemas.StageMain), []byte("garbage"))
	step := stepOf("r", "u", 0, 0, make([]byte, 32))
	publish(t, p.Bus, withImage(completed("r", "u", 0, refTo(t, step, publish(t, p.Bus, step))), nil))
	var out bytes.Buffer
	s, err := export.WriteArchive(t.Context(), p.Bus, "r", &out)
	if err != nil || s.LeftOut != 1 || s.Missing != 1 || s.Events[schemas.StreamTrajectories] != 1 ||
		len(s.Notes) != 2 {
		t.Fatalf("%+v, %v", s, err)
	}
	blob := strings.Repeat("0", 64)
	if !strings.Contains(s.Notes[0], "sequence 1 of MDR_TRAJECTORIES") || !strings.Contains(s.Notes[1], blob) {
		t.Errorf("notes %q", s.Notes)
	}
	done, err := importRun(t, bustest.New(t).Bus, out.Bytes(), export.ImportOptions{})
	if err != nil || done.Stored != 3 || done.Missing != 1 || len(done.Notes) != 1 ||
		!strings.Contains(done.Notes[0], blob) {
		t.Errorf("%+v, %v", done, err)
	}
	// Where it is from, it is not put beside what it left out.
	if _, err := importRun(t, p.Bus, out.Bytes(), export.ImportOptions{}); !errors.Is(err, export.ErrOther) {
		t.Error(err)
	}
}
