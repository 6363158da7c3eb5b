package integration_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rs/zerolog"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// typeScript compiles the client with more files, strictly, and returns the folder of the programs.
func typeScript(t *testing.T, more map[string]string) (programs string) {
	t.Helper()
	packages := os.Getenv("MEANDER_TYPESCRIPT")
	if packages == "" {
		t.Skip("the TypeScript client is not tested: MEANDER_TYPESCRIPT is not set; make ts-test sets it, and needs " +
			"node and npm")
	}
	dir := t.TempDir()
	err := os.CopyFS(filepath.Join(dir, "src"), os.DirFS(filepath.Join(root, "pkg/client/typescript/src")))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"package.json", "tsconfig.json"} { // and not what npm has made there
		if err := os.WriteFile(filepath.Join(dir, name), []byte(read(t, "pkg/client/typescript/"+name)),
			0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range more {
		if err := os.WriteFile(filepath.Join(dir, "src", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(packages, "node_modules"), filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	compile := exec.CommandContext(t.Context(), filepath.Join(packages, "node_modules/.bin/tsc"), "--strict", "-p", dir)
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("tsc: %v\n%s", err, out)
	}
	return filepath.Join(dir, "dist")
}

// literal writes what msgpack decodes to as a TypeScript literal: integers that @msgpack/msgpack gives as bigint, bytes
// as Uint8Array.
func literal(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case bool:
		return strconv.FormatBool(v)
	case string:
		text, _ := json.Marshal(v) // a string has no error
		return string(text)
	case []byte:
		return fmt.Sprintf("bytes(%q)", hex.EncodeToString(v))
	case float32:
		return literal(float64(v))
	case float64:
		switch {
		case math.IsNaN(v):
			return "NaN"
		case math.IsInf(v, 0):
			return strings.Replace(strings.TrimSuffix(fmt.Sprint(v), "Inf")+"Infinity", "+", "", 1)
		}
		return strconv.FormatFloat(v, 'g', -1, 64)
	case []any:
		items := make([]string, len(v))
		for i, x := range v {
			items[i] = literal(x)
		}
		return "[" + strings.Join(items, ", ") + "]"
	case map[string]any:
		var items []string
		for _, k := range slices.Sorted(maps.Keys(v)) {
			items = append(items, literal(k)+": "+literal(v[k]))
		}
		return "{" + strings.Join(items, ", ") + "}"
	}
	if x := reflect.ValueOf(v); x.CanUint() {
		if n := x.Uint(); n > math.MaxUint32 {
			return fmt.Sprintf("%dn", n)
		}
	} else if n := x.Int(); n > math.MaxUint32 || n < math.MinInt32 {
		return fmt.Sprintf("%dn", n)
	}
	return fmt.Sprint(v)
}

// The generated types take every golden event, and its bytes decode to it: no field, literal or bit is another.
func TestTypeScript_Goldens(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "schemas/testdata/golden/*.msgpack"))
	if err != nil || len(files) < 100 {
		t.Fatalf("%d goldens, %v", len(files), err)
	}
	types := map[string]string{}
	for _, e := range schemas.Events() {
		name, _, _ := strings.Cut(e.Type(), "/")
		types[name] = reflect.TypeOf(e).Elem().Name()
	}
	var program strings.Builder
	program.WriteString(`import { deepStrictEqual } from "node:assert/strict";
import { readFileSync } from "node:fs";
import { decode } from "./client.js";
import { hasPayloadDigest } from "./digest.js";
import type * as contract from "./contract.js";

const bytes = (hex: string) => Uint8Array.from(Buffer.from(hex, "hex"));
const plain = (v: unknown): unknown => // Uint8Array in place of views of the file
  v instanceof Uint8Array ? Uint8Array.from(v)
  : Array.isArray(v) ? v.map(plain)
  : v && typeof v === "object" ? Object.fromEntries(Object.entries(v).map(([k, x]) => [k, plain(x)])) : v;
const check = (file: string, want: unknown) => deepStrictEqual(plain(decode(readFileSync(file))), want, file);
const named = (file: string, digest: string) => {
	const other = digest.replace(/.$/, (c) => (c === "0" ? "1" : "0"));
	deepStrictEqual([hasPayloadDigest(readFileSync(file), digest), hasPayloadDigest(readFileSync(file), other)], [true, false], file);
};
`)
	var digests map[string]string
	if err := json.Unmarshal([]byte(read(t, "schemas/testdata/digests.json")), &digests); err != nil {
		t.Fatal(err)
	}
	for i, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := msgpack.Unmarshal(data, &v); err != nil {
			t.Fatal(err)
		}
		path, err := filepath.Abs(file)
		if err != nil {
			t.Fatal(err)
		}
		name, _, _ := strings.Cut(strings.TrimSuffix(filepath.Base(file), ".msgpack"), "-")
		fmt.Fprintf(&program, "const e%d: contract.%s = %s;\ncheck(%q, e%d);\n", i, types[name], literal(v), path, i)
		if digest, ok := digests[strings.TrimSuffix(filepath.Base(file), ".msgpack")+" payload"]; ok {
			fmt.Fprintf(&program, "named(%q, %q);\n", path, digest)
		}
	}
	fmt.Fprintf(&program, "console.log(%d);\n", len(files))
	dir := typeScript(t, map[string]string{"goldens.ts": program.String()})
	if out, err := exec.CommandContext(t.Context(), "node",
		filepath.Join(dir, "goldens.js")).CombinedOutput(); err != nil ||
		strings.TrimSpace(string(out)) != fmt.Sprint(len(files)) {
		t.Errorf("%v\n%s", err, out)
	}
}

// checkReads checks what the program says of watched tensors, of a tensor of F16, and of how its waits ended.
func checkReads(t *testing.T, latents [][2]int, bits []float64, ended []string) {
	t.Helper()
	for _, n := range latents {
		if n[0] != n[1] || n[0] == 0 {
			t.Errorf("a tensor has %d numbers; its shape says %d", n[0], n[1])
		}
	}
	if len(latents) == 0 || fmt.Sprint(bits) != "[15360]" {
		t.Errorf("%d tensors were watched; bits of F16 are %v", len(latents), bits)
	}
	if len(ended) != 5 || strings.Count(strings.Join(ended[:4], ", "), "enough") != 4 ||
		!strings.Contains(ended[4], "closed") {
		t.Errorf("waits ended with %q", ended)
	}
}

// storeLargeStep stores step 0 of a sample, whose tensor travels in parts, and returns its payload digest and the
// SHA-256 of the tensor.
func storeLargeStep(t *testing.T, b *bus.Bus) (digest, sum string) {
	t.Helper()
	p := b.NewPublisher(8, 1<<20)
	defer p.Close()
	data := bytes.Repeat([]byte("large "), 500_000)
	f, err := p.PublishStep(t.Context(), &schemas.Step{
		Stage: schemas.StageMain,
		Run:   "large", UID: "p", Attempt: "a", NumInferenceSteps: 1, Transition: schemas.TransitionODE, Sigma: 1, Timestep: 1000,
		LogProbKind: schemas.LogProbDensity, ElementCount: 1, Debug: []schemas.NamedTensor{}, ScheduleDigest: strings.Repeat("0", 64),
		Latents: []schemas.IndexedTensor{{Tensor: schemas.Tensor{DType: "U8", Shape: []int64{int64(len(data)), 1}, Data: data}}},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ack, err := f.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return ack.Digest, fmt.Sprintf("%x", sha256.Sum256(data))
}

// readSample is what the program prints of a sample.
type readSample struct {
	Reward, Advantage *float64
	Seed              string
	LogProbs          []*float64 `json:"log_probs"`
	Digest, Image     string
	States            []struct { // of step 1
		Index int64
		Data  []byte
	}
	Other string // the error of reading step 1 by another's digest
	Later string // that of a sample with a setting of a later version
}

// compare checks it against what is stored of sample i.
func (s *readSample) compare(t *testing.T, b *bus.Bus, i int64, member *schemas.Member) {
	t.Helper()
	c := client.New(b)
	stored, err := c.Trajectory(t.Context(), "ts", "p", i)
	if err != nil {
		t.Fatal(err)
	}
	image, err := c.Medium(t.Context(), stored, schemas.KindImage)
	if err != nil {
		t.Fatal(err)
	}
	if *s.Reward != *member.Reward || *s.Advantage != *member.Advantage || s.Seed != fmt.Sprint(stored.SampleSeed) ||
		!reflect.DeepEqual(s.LogProbs, stored.LogProbs) || s.Digest != stored.ContentDigest ||
		s.Image != base64.StdEncoding.EncodeToString(image) {
		t.Errorf("sample %d: %+v; stored is %+v", i, s, stored)
	}
	step, err := b.LoadStepOf(t.Context(), stored, 1)
	if err != nil || len(s.States) != 1 || len(step.Latents) != 1 || s.States[0].Index != 1 ||
		!bytes.Equal(s.States[0].Data, step.Latents[0].Tensor.Data) || !strings.Contains(s.Other, "is not the event") ||
		!strings.Contains(s.Later, "setting cfg_phase=0.2 is not known to this version") {
		t.Errorf("sample %d: states %+v, another digest gives %q, a later setting %q, %v", i, s.States, s.Other,
			s.Later, err)
	}
}

// A program of the client publishes a prompt, is refused another, follows the run, and reads what is stored.
func TestTypeScript_Program(t *testing.T) {
	dir := typeScript(t, map[string]string{"program.ts": read(t, "integration/testdata/typescript/program.ts")})
	url := serve(t, t.TempDir()).URL
	b, err := bus.Connect(t.Context(), bus.Config{URL: url, Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	digest, parts := storeLargeStep(t, b)
	var errs bytes.Buffer
	program := exec.CommandContext(t.Context(), "node", filepath.Join(dir, "program.js"), url, digest)
	program.Stderr = &errs
	out, err := program.Output()
	if err != nil {
		t.Fatalf("%v\n%s%s", err, out, &errs)
	}
	var got struct {
		Accepted     bool
		Steps        int
		Refused      string
		Seen         map[string]int
		Sigmas       int
		Subject      string
		Seq          uint64
		Time         int64
		Samples      []readSample
		Parts        string
		Halves, Bits []float64
		Latents      [][2]int
		Ended        []string
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if !got.Accepted || got.Steps != 8 || got.Refused != "uid_conflict" || got.Sigmas != 8 ||
		fmt.Sprint(got.Halves) != "[1 -2.5]" ||
		fmt.Sprint(got.Seen) != "map[advantage:1 reward:2 step:8 trajectory:2]" {
		t.Errorf("%.600s", out)
	}
	checkReads(t, got.Latents, got.Bits, got.Ended)
	if got.Parts != parts {
		t.Errorf("the tensor in parts has sha-256 %s, want %s", got.Parts, parts)
	}
	m, err := b.Last(t.Context(), schemas.StreamPrompts, schemas.PromptSubject("ts"))
	if err != nil {
		t.Fatal(err)
	}
	var prompt schemas.Prompt // decoded strictly: an integer is no float
	if err := schemas.Decode(m.Data, &prompt); err != nil || *prompt.Seed != 1<<40 {
		t.Errorf("the stored prompt: %+v, %v", prompt, err)
	}
	m, err = b.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("ts", "p"))
	if err != nil {
		t.Fatal(err)
	}
	var group schemas.Advantage
	if err := schemas.Decode(m.Data, &group); err != nil {
		t.Fatal(err)
	}
	if got.Subject != m.Subject || got.Seq != m.Seq || got.Time != m.Time.UnixMilli() ||
		len(got.Samples) != len(group.Members) {
		t.Errorf("%s #%d at %d, %d samples; stored are %s #%d at %d, %d", got.Subject, got.Seq, got.Time,
			len(got.Samples),
			m.Subject, m.Seq, m.Time.UnixMilli(), len(group.Members))
	}
	for i, s := range got.Samples {
		s.compare(t, b, int64(i), &group.Members[i])
	}
}
