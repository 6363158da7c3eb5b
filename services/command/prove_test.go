package command

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/services/prove"
)

// shippedProof has the run of two updates of an adapter of signs, as an archive, and the adapter.
const shippedProof = "../../deploy/learn/proof/"

// keys writes an ed25519 key and its public one as PEM files.
func keys(t *testing.T) (private, public string) {
	t.Helper()
	of, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, data []byte, err error) string {
		name = filepath.Join(t.TempDir(), name)
		if err == nil {
			err = os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: "KEY", Bytes: data}), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	data, err := x509.MarshalPKCS8PrivateKey(key)
	private = write("key.pem", data, err)
	data, err = x509.MarshalPKIXPublicKey(of)
	return private, write("key.pub.pem", data, err)
}

// shippedArchive returns a copy of the archive that is shipped, beside which a signature may be written.
func shippedArchive(t *testing.T) string {
	t.Helper()
	archive := filepath.Join(t.TempDir(), "signs.tar")
	data, err := os.ReadFile(shippedProof + "signs.tar")
	if err == nil {
		err = os.WriteFile(archive, data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return archive
}

// What is proved can be signed; the exit status and the last line say the same; another key, archive or adapter does
// not pass.
func TestProve(t *testing.T) {
	t.Parallel()
	archive := shippedArchive(t)
	adapter := shippedProof + "adapter"
	private, public := keys(t)
	_, other := keys(t)
	links := []string{"--archive", archive, "--links", "archive,weights,chain,batch"}
	for _, of := range []struct {
		args   []string
		status int
		want   string // at the end of stdout, or in stderr
	}{
		{append([]string{adapter}, links...), 0, "proved; left out: 7 of 11 links\n"},
		{append([]string{adapter, "--signed", public}, links...), 1, "not proved: unchecked: 1 of 11 links\n"},
		{append([]string{adapter, "--sign", private}, links...), 0, "proved; left out: 6 of 11 links\n"},
		{append([]string{"2", "--signed", public}, links...), 0, "proved; left out: 6 of 11 links\n"},
		{append([]string{"1", "--signed", public}, links...), 1, "not proved: broken: 1 of 11 links\n"},
		{append([]string{"2", "--signed", other}, links...), 1, "not proved: broken: 1 of 11 links\n"},
		{append([]string{"2", "--sign", public}, links...), 2, "must be an ed25519 key"},
		{append([]string{"2", "--signed", private}, links...), 2, "must be a public ed25519 key"},
		{append([]string{"2", "--signed", ""}, links...), 2, "--signed: "},
		{[]string{"3", "--archive", archive}, 2, "version 3: not in the archive; must be one of"},
		{[]string{"--archive", archive, "--links", "weight"}, 2, `--links: "weight"`},
		{[]string{"--archive", archive, "--run", "x"}, 2, "--run: is of a store"},
		{[]string{"--sign", private}, 2, "are for an archive"},
		{[]string{"--archive", archive, "--samples", "0"}, 2, "--samples: 0"},
		{[]string{"--archive", archive + ".gone"}, 2, "--archive: "},
		{[]string{archive + ".gone", "--archive", archive}, 2, "signs.tar.gone"},
	} {
		var stdout, stderr strings.Builder
		status := Execute(t.Context(), append([]string{"prove"}, of.args...), strings.NewReader(""), &stdout, &stderr)
		if status != of.status || !strings.HasSuffix(stdout.String(), of.want) &&
			!strings.Contains(stderr.String(), of.want) {
			t.Errorf("%q: status %d\n%s%s", of.args, status, &stdout, &stderr)
		}
	}
	var stdout, stderr strings.Builder
	args := append([]string{"prove", "--json"}, links...)
	status := Execute(t.Context(), args, strings.NewReader(""), &stdout, &stderr)
	var r prove.Report
	err := json.Unmarshal([]byte(stdout.String()), &r)
	if err != nil || status != 0 || !r.Proved || len(r.Links) != 11 || r.Links[10].Verdict != prove.LeftOut {
		t.Errorf("status %d: %v\n%s%s", status, err, &stdout, &stderr)
	}
}

// Where a key is demanded nothing passes but its signature of these very bytes, whatever the file beside them is.
func TestProve_Signature(t *testing.T) {
	t.Parallel()
	archive := shippedArchive(t)
	private, public := keys(t)
	signs := func(archive string, args ...string) (int, prove.Link) {
		var stdout, stderr strings.Builder
		args = append([]string{"prove", "--json", "--archive", archive, "--links", "archive"}, args...)
		status := Execute(t.Context(), args, strings.NewReader(""), &stdout, &stderr)
		var r prove.Report
		if err := json.Unmarshal([]byte(stdout.String()), &r); err != nil || r.Proved != (status == 0) {
			t.Fatalf("%q: status %d: %v\n%s%s", args, status, err, &stdout, &stderr)
		}
		return status, r.Links[len(r.Links)-1]
	}
	if status, link := signs(archive, "--sign", private); status != 0 || link.Verdict != prove.Holds {
		t.Fatalf("status %d: %+v", status, link)
	}
	right, err := os.ReadFile(archive + ".sig")
	if err != nil {
		t.Fatal(err)
	}
	for name, of := range map[string]struct {
		file    []byte
		verdict string
	}{
		"right":      {right, prove.Holds},
		"empty":      {nil, prove.Broken},
		"nothing":    {[]byte("null"), prove.Broken},
		"two":        {slices.Concat(right, right), prove.Broken},
		"too long":   {slices.Concat(right, make([]byte, 1<<20)), prove.Broken},
		"of another": {bytes.Replace(right, []byte(`{"archive":"`), []byte(`{"archive":"0`), 1), prove.Broken},
		"changed":    {bytes.Replace(right, []byte(`"signature":"`), []byte(`"signature":"AAAA`), 1), prove.Broken},
	} {
		if err := os.WriteFile(archive+".sig", of.file, 0o600); err != nil {
			t.Fatal(err)
		}
		status, link := signs(archive, "--signed", public)
		if link.Verdict != of.verdict || (status == 0) != (of.verdict == prove.Holds) {
			t.Errorf("%s: status %d: %+v", name, status, link)
		}
	}
	if err := os.Remove(archive + ".sig"); err != nil {
		t.Fatal(err)
	}
	if status, link := signs(archive, "--signed", public); status != 1 || link.Verdict != prove.Unchecked {
		t.Errorf("status %d: %+v", status, link)
	}
	if status, link := signs(archive); status != 0 || link.Verdict != prove.LeftOut ||
		!strings.Contains(link.What, "nothing holds times, names") {
		t.Errorf("status %d: %+v", status, link)
	}
}
