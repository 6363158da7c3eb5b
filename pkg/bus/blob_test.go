package bus_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

func TestBus_blobs(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		for name, data := range map[string][]byte{
			"empty": {}, "small": []byte("an image"), "many chunks": bytes.Repeat([]byte("0123456789"), 150_000),
		} {
			ref, err := e.PutBlob(ctx, data)
			sum := sha256.Sum256(data)
			if err != nil || ref != (schemas.Ref{
				Bucket: schemas.BlobBucket, Digest: hex.EncodeToString(sum[:]), Size: int64(len(data)),
			}) {
				t.Fatalf("%s: got %+v, %v", name, ref, err)
			}
			got, err := e.GetBlob(ctx, ref)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s: got %d bytes, %v; want %d", name, len(got), err, len(data))
			}
			os, err := e.JetStream().ObjectStore(ctx, schemas.BlobBucket)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := os.GetBytes(ctx, ref.Digest); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s, by the library: got %d bytes, %v; want %d", name, len(got), err, len(data))
			}
			before := e.Info(t, "OBJ_"+schemas.BlobBucket).State.LastSeq
			if again, err := e.PutBlob(ctx, data); err != nil || again != ref {
				t.Errorf("%s again: got %+v, %v", name, again, err)
			}
			if after := e.Info(t, "OBJ_"+schemas.BlobBucket).State.LastSeq; after != before {
				t.Errorf("%s was written again", name)
			}
		}
	})
}

func TestBus_GetBlob_refuses(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	ctx := t.Context()
	ref, err := e.PutBlob(ctx, []byte("an image"))
	if err != nil {
		t.Fatal(err)
	}
	// An object that is not what its name says.
	os, err := e.JetStream().ObjectStore(ctx, schemas.BlobBucket)
	if err != nil {
		t.Fatal(err)
	}
	forged := strings.Repeat("ab", 32)
	info, err := os.GetInfo(ctx, ref.Digest)
	if err != nil {
		t.Fatal(err)
	}
	info.Name = forged
	entry, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	subject := "$O." + schemas.BlobBucket + ".M." + base64.URLEncoding.EncodeToString([]byte(forged))
	if _, err := e.JetStream().Publish(ctx, subject, entry); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		ref  schemas.Ref
		want error // nil: a terminal one
	}{
		"unknown":        {schemas.Ref{Bucket: ref.Bucket, Digest: strings.Repeat("00", 32), Size: ref.Size}, bus.ErrNotFound},
		"wrong size":     {schemas.Ref{Bucket: ref.Bucket, Digest: ref.Digest, Size: ref.Size - 1}, bus.ErrCorrupt},
		"forged":         {schemas.Ref{Bucket: ref.Bucket, Digest: forged, Size: ref.Size}, bus.ErrCorrupt},
		"foreign bucket": {schemas.Ref{Bucket: "other", Digest: ref.Digest, Size: ref.Size}, nil},
		"short digest":   {schemas.Ref{Bucket: ref.Bucket, Digest: "ab", Size: ref.Size}, nil},
		"upper case":     {schemas.Ref{Bucket: ref.Bucket, Digest: strings.ToUpper(ref.Digest), Size: ref.Size}, nil},
		"negative":       {schemas.Ref{Bucket: ref.Bucket, Digest: ref.Digest, Size: -1}, nil},
		"huge":           {schemas.Ref{Bucket: ref.Bucket, Digest: ref.Digest, Size: 1 << 60}, nil},
	} {
		data, err := e.GetBlob(ctx, test.ref)
		terminal := errors.As(err, new(*bus.TerminalError))
		if err == nil || terminal != (test.want == nil) || !terminal && !errors.Is(err, test.want) {
			t.Errorf("%s: got %q, %v; want %v", name, data, err, test.want)
		}
	}
	negative := schemas.Ref{Bucket: ref.Bucket, Digest: ref.Digest, Size: -1}
	if _, err := e.GetBlob(ctx, negative); err == nil || !strings.Contains(err.Error(), "size: -1; must be 0 to") {
		t.Errorf("a negative size: got %v; want the sizes that are allowed", err)
	}
}

// sizes notes what is written at a time.
type sizes struct{ most, all int }

func (s *sizes) Write(p []byte) (int, error) {
	s.most, s.all = max(s.most, len(p)), s.all+len(p)
	return len(p), nil
}

// Blobs of any size are copied a chunk at a time: what is in memory does not grow with them.
func TestBus_CopyBlob(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	ref, err := e.PutBlob(t.Context(), bytes.Repeat([]byte("0123456789"), 300_000))
	if err != nil {
		t.Fatal(err)
	}
	got := &sizes{}
	if err := e.CopyBlob(t.Context(), ref, got); err != nil || got.all != int(ref.Size) || got.most > 256<<10 {
		t.Errorf("copied %d bytes, at most %d at a time, %v", got.all, got.most, err)
	}
	// weights are larger than what is held in memory
	large := schemas.Ref{Bucket: ref.Bucket, Digest: ref.Digest, Size: 3 << 30}
	if err := e.CopyBlob(t.Context(), large, got); !errors.Is(err, bus.ErrCorrupt) {
		t.Errorf("of another size: %v; want %v", err, bus.ErrCorrupt)
	}
	wrong := schemas.Ref{Bucket: ref.Bucket, Digest: strings.Repeat("00", 32), Size: 3 << 30}
	if err := e.HasBlob(t.Context(), wrong); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("a large one that is not there: %v; want %v", err, bus.ErrNotFound)
	}
}

// A blob that does not fit is refused before any of it is written, in words, and the store counts as full though a
// smaller blob would fit.
func TestBus_PutBlob_fullSays(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	if err := e.SetLimits(t.Context(), bus.StreamLimit{
		Stream: schemas.StreamBlobBucket, MaxBytes: 2 << 20,
	}); err != nil {
		t.Fatal(err)
	}
	before := e.Info(t, schemas.StreamBlobBucket).State.LastSeq
	_, err := e.PutBlob(t.Context(), make([]byte, 3<<20))
	if !errors.Is(err, bus.ErrStreamFull) || strings.Contains(err.Error(), "503") ||
		!strings.Contains(err.Error(), "the object store of images, embeddings and weights holds 0 of 2097152 bytes, "+
			"and these are 3145728") {
		t.Errorf("too large: %v", err)
	}
	if after := e.Info(t, schemas.StreamBlobBucket).State.LastSeq; after != before {
		t.Errorf("%d messages were written of it", after-before)
	}
	faults, err := e.Faults(t.Context())
	if err != nil || len(faults) != 1 || faults[0].Name != schemas.StreamBlobBucket || !faults[0].Full() {
		t.Errorf("faults %+v, %v; want that the object store is full", faults, err)
	}
	if _, err := e.PutBlob(t.Context(), make([]byte, 1<<20)); err != nil {
		t.Errorf("one that fits: %v", err)
	}
	for i := range 5 { // of one chunk each
		if _, err = e.PutBlob(t.Context(), bytes.Repeat([]byte{byte(i)}, 250_000)); err != nil {
			break
		}
	}
	if !errors.Is(err, bus.ErrStreamFull) || strings.Contains(err.Error(), "503") {
		t.Errorf("a small one: %v", err)
	}
}

// A caller that stops waiting is let go, wherever the read was.
func TestBus_GetBlob_cancelled(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ref, err := e.PutBlob(t.Context(), bytes.Repeat([]byte("0123456789"), 400_000))
		if err != nil {
			t.Fatal(err)
		}
		cancelled := 0
		for i := range 40 {
			ctx, cancel := context.WithCancel(t.Context())
			stop := time.AfterFunc(time.Duration(i)*200*time.Microsecond, cancel)
			_, err := e.GetBlob(ctx, ref)
			if err != nil {
				cancelled++
				if !errors.Is(err, context.Canceled) {
					t.Errorf("got %v, want the context's error", err)
				}
			}
			stop.Stop()
			cancel()
		}
		if cancelled == 0 {
			t.Error("every read ended before it was cancelled; make the blob larger")
		}
	})
}

// A blob whose bytes are gone or cut is never returned.
func TestBus_GetBlob_bytesGone(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	for name, size := range map[string]int{"one chunk": 1000, "three chunks": 700_000} {
		ref, err := e.PutBlob(t.Context(), bytes.Repeat([]byte{7}, size))
		if err != nil {
			t.Fatal(err)
		}
		s, err := e.JetStream().Stream(t.Context(), "OBJ_"+schemas.BlobBucket)
		if err != nil {
			t.Fatal(err)
		}
		last, err := s.GetLastMsgForSubject(t.Context(), "$O."+schemas.BlobBucket+".C.>")
		if err != nil {
			t.Fatal(err)
		}
		if err := s.DeleteMsg(t.Context(), last.Sequence); err != nil {
			t.Fatal(err)
		}
		if data, err := e.GetBlob(t.Context(), ref); !errors.Is(err, bus.ErrCorrupt) {
			t.Errorf("%s: got %d bytes, %v; want ErrCorrupt", name, len(data), err)
		}
	}
}

func TestBus_PutBlob_full(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	e.resize(t, "OBJ_"+schemas.BlobBucket, 1<<20, -1)
	data := bytes.Repeat([]byte{1}, 400_000)
	var err error
	for i := range 5 {
		data[0] = byte(i)
		if _, err = e.PutBlob(t.Context(), data); err != nil {
			break
		}
	}
	if !errors.Is(err, bus.ErrStreamFull) {
		t.Errorf("got %v, want ErrStreamFull", err)
	}
	// What does not fit leaves nothing behind: two whole blobs and their entries.
	if state := e.Info(t, "OBJ_"+schemas.BlobBucket).State; state.Msgs != 2*(2+1) {
		t.Errorf("%d messages are stored, want 6", state.Msgs)
	}
}

// A blob that is not what its name says is replaced.
func TestBus_PutBlob_replaces(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	data := []byte("an image")
	ref, err := e.PutBlob(t.Context(), data)
	if err != nil {
		t.Fatal(err)
	}
	entry, err := json.Marshal(jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: ref.Digest}, Bucket: ref.Bucket, NUID: "none", Size: 4,
	})
	if err != nil {
		t.Fatal(err)
	}
	subject := "$O." + ref.Bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(ref.Digest))
	if _, err := e.JetStream().Publish(t.Context(), subject, entry); err != nil {
		t.Fatal(err)
	}
	if _, err := e.GetBlob(t.Context(), ref); !errors.Is(err, bus.ErrCorrupt) {
		t.Fatalf("got %v, want ErrCorrupt", err)
	}
	if _, err := e.PutBlob(t.Context(), data); err != nil {
		t.Fatal(err)
	}
	if got, err := e.GetBlob(t.Context(), ref); err != nil || !bytes.Equal(got, data) {
		t.Errorf("got %q, %v; want %q", got, err, data)
	}
}

// A dead letter whose original does not fit keeps it in the object store.
func TestBus_Dead_large(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		data := bytes.Repeat([]byte("x"), e.MaxInline())
		ack, err := e.PublishRaw(ctx, schemas.PromptSubject("r1"), data, nil, "")
		if err != nil {
			t.Fatal(err)
		}
		m, err := e.Get(ctx, ack.Stream, ack.Seq)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second is a duplicate
			if err := e.Dead(ctx, "intake", schemas.CodeDecode, "not an event", m); err != nil {
				t.Fatal(err)
			}
		}
		dead := bustest.Dead(t, e.Bus, 0)
		if len(dead) != 1 || len(dead[0].Data) != 0 || len(dead[0].Headers) != 1 ||
			dead[0].Headers[0].Name != bus.HeaderRef {
			t.Fatalf("got %d letters: %+v", len(dead), dead)
		}
		if got, err := e.DeadData(ctx, dead[0]); err != nil || !bytes.Equal(got, data) {
			t.Errorf("got %d bytes, %v; want %d", len(got), err, len(data))
		}
	})
}

func TestBus_Dead_names(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	prompt, err := schemas.Encode(&schemas.Prompt{UID: "u9", Prompt: "a red fox"})
	if err != nil {
		t.Fatal(err)
	}
	for i, test := range []struct {
		subject string
		data    []byte
		run     schemas.Run
		uid     schemas.UID
		stored  string
	}{
		{schemas.PromptSubject("r1"), prompt, "r1", "u9", "mdr.v1.dead.reward.r1.u9"},
		{schemas.PromptSubject("r1"), []byte("junk"), "r1", "", "mdr.v1.dead.reward.r1._"},
		{schemas.RequestSubject("r1", "lane", "u1", 2, schemas.StageMain), nil, "r1", "u1", "mdr.v1.dead.reward.r1.u1"},
		{schemas.TrajectorySubject("r1", "u1", 2, schemas.StageMain), nil, "r1", "u1", "mdr.v1.dead.reward.r1.u1"},
		{"mdr.v1.reward.5.r1.b1.u1.2", nil, "r1", "u1", "mdr.v1.dead.reward.r1.u1"},
		{schemas.AdvantageSubject("r1", "u1"), nil, "r1", "u1", "mdr.v1.dead.reward.r1.u1"},
		{"elsewhere", []byte{0xff}, "", "", "mdr.v1.dead.reward._._"},
	} {
		m := &bus.Message{Subject: test.subject, Data: test.data, Stream: "S", Seq: uint64(i + 1), Delivered: 2}
		if err := e.Dead(t.Context(), "reward", schemas.CodeInvalid, "no", m); err != nil {
			t.Fatal(err)
		}
		stored, err := e.Newest(t.Context(), schemas.StreamDead)
		if err != nil {
			t.Fatal(err)
		}
		var d schemas.Dead
		if err := schemas.Decode(stored.Data, &d); err != nil {
			t.Fatal(err)
		}
		if d.Run != test.run || d.UID != test.uid || stored.Subject != test.stored ||
			d.OriginalSubject != test.subject || !bytes.Equal(d.Data, test.data) {
			t.Errorf("%s: got %+v on %s", test.subject, d, stored.Subject)
		}
	}
}
