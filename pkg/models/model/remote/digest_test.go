package remote_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

// The digest of a folder is the same, whichever side computes it, so a sample of one can be verified by the other.
func TestOpen_DigestIsThatOfTheNativeFamily(t *testing.T) {
	signs := "../../../../deploy/models/signs"
	native, err := qwenimage.Family().Open(signs, model.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	want := native.Card().WeightsDigest
	if err := native.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := remote.Digest(signs); err != nil || got != want {
		t.Errorf("digest %s, %v; want %s", got, err, want)
	}
	a, b := remotetest.Folder(t, class, 1), remotetest.Folder(t, class, 2)
	one, err1 := remote.Digest(a)
	two, err2 := remote.Digest(b)
	if err := errors.Join(err1, err2); err != nil || one == two {
		t.Errorf("digests %s and %s of other weights, %v", one, two, err)
	}
	// A chat template decides the tokens of every prompt.
	template := filepath.Join(a, "tokenizer", "chat_template.jinja")
	err = errors.Join(os.MkdirAll(filepath.Dir(template), 0o700), os.WriteFile(template, []byte("{{ messages }}"),
		0o600))
	if other, err1 := remote.Digest(a); err != nil || err1 != nil || other == one {
		t.Errorf("digest %s with another chat template, %v, %v", other, err, err1)
	}
	// Of the files of an encoder that the pipeline goes without nothing is read.
	left := filepath.Join(a, "text_encoder_3", "config.json")
	err = errors.Join(os.MkdirAll(filepath.Dir(left), 0o700), os.WriteFile(left, []byte("{}"), 0o600))
	if _, missing := remote.Digest(a); err != nil || missing == nil {
		t.Errorf("an encoder without weights: %v, %v", err, missing)
	}
	addEntry(t, a, `"text_encoder_3": [null, null]`)
	if _, err := remote.Digest(a); err != nil {
		t.Errorf("one that the pipeline goes without: %v", err)
	}
	// The boundary between two networks decides which one computes, and chosen layers what a prompt is.
	digests := map[string]bool{two: true}
	for _, entry := range []string{
		`"boundary_ratio": 0.5`, `"boundary_ratio": 0.6`, `"text_encoder_select_layers": [1, 2]`,
		`"text_encoder_select_layers": [12]`,
	} {
		digest, err := remote.Digest(addEntry(t, remotetest.Folder(t, class, 2), entry))
		if err != nil {
			t.Error(err)
		}
		digests[digest] = true
	}
	if len(digests) != 5 {
		t.Errorf("digests %v without an entry and with four; want five", digests)
	}
}

// addEntry adds an entry to the model_index.json of a folder, and returns the folder.
func addEntry(t *testing.T, dir, entry string) string {
	t.Helper()
	index := filepath.Join(dir, "model_index.json")
	data, err := os.ReadFile(index)
	if err == nil {
		err = os.WriteFile(index, bytes.Replace(data, []byte("{"), []byte("{"+entry+","), 1), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// The frames of a second of meander.json are an input of LTX-Video's network, and of no other.
func TestDigest_FPS(t *testing.T) {
	for class, want := range map[string]int{"LTXPipeline": 3, "WanPipeline": 1} {
		digests := map[string]bool{}
		for _, defaults := range []string{"{}", `{"fps": 5}`, `{"fps": 25}`} {
			dir := remotetest.Folder(t, class, 1)
			if err := os.WriteFile(filepath.Join(dir, "meander.json"), []byte(defaults), 0o600); err != nil {
				t.Fatal(err)
			}
			digest, err := remote.Digest(dir)
			if err != nil {
				t.Error(err)
			}
			digests[digest] = true
		}
		if len(digests) != want {
			t.Errorf("%s: %d digests, want %d", class, len(digests), want)
		}
	}
}
