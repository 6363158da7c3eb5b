package remote_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/qwenimage"
	"github.com/meander-rl/meander/pkg/model/remote"
	"github.com/meander-rl/meander/pkg/model/remote/remotetest"
)

// The digest of a folder is the same, whichever side computes it, so a sample of one can be verified by the other.
func TestOpen_DigestIsThatOfTheNativeFamily(t *testing.T) {
	signs := "../../../deploy/models/signs"
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
	err = errors.Join(os.MkdirAll(filepath.Dir(template), 0o700), os.WriteFile(template, []byte("{{ messages }}"), 0o600))
	if other, err1 := remote.Digest(a); err != nil || err1 != nil || other == one {
		t.Errorf("digest %s with another chat template, %v, %v", other, err, err1)
	}
	// The boundary between two networks decides which one computes, and chosen layers what a prompt is.
	index := filepath.Join(b, "model_index.json")
	data, err := os.ReadFile(index)
	if err != nil {
		t.Fatal(err)
	}
	digests := map[string]bool{two: true}
	for _, entry := range []string{
		`"boundary_ratio": 0.5`, `"boundary_ratio": 0.6`, `"text_encoder_select_layers": [1, 2]`,
		`"text_encoder_select_layers": [12]`,
	} {
		more := bytes.Replace(data, []byte("{"), []byte("{"+entry+","), 1)
		if err := os.WriteFile(index, more, 0o600); err != nil {
			t.Fatal(err)
		}
		digest, err := remote.Digest(b)
		if err != nil {
			t.Error(err)
		}
		digests[digest] = true
	}
	if len(digests) != 5 {
		t.Errorf("digests %v without an entry and with four; want five", digests)
	}
}
