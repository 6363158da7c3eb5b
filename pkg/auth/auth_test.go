package auth_test

import (
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/schemas"
)

// create makes a folder with certificates and one more viewer.
func create(t *testing.T) *auth.Folder {
	t.Helper()
	f, err := auth.Create(filepath.Join(t.TempDir(), "auth"), "127.0.0.1:4222",
		[]string{"nats.example.org", "10.0.0.7"})
	if err == nil {
		err = f.Add(auth.User{Name: "alice", Role: auth.RoleViewer})
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Each role has a user with a file of its own, and no secret is anywhere else.
func TestFolder(t *testing.T) {
	t.Parallel()
	f := create(t)
	f, err := auth.Open(f.Dir())
	if err != nil {
		t.Fatal(err)
	}
	if want := append(auth.RoleNames(), "alice"); !slices.Equal(f.Names(), want) {
		t.Errorf("users %v; want %v", f.Names(), want)
	}
	config := read(t, filepath.Join(f.Dir(), "auth.conf"))
	for _, u := range f.Users {
		secret := read(t, f.Credentials(u.Name))
		seed := secret[strings.Index(secret, "\nSU")+1:]
		if !strings.Contains(config, u.Key) || strings.Contains(config, strings.TrimSpace(seed)) {
			t.Errorf("auth.conf: %s: the public key must be in it, and the secret one must not", u.Name)
		}
		id, err := auth.ReadIdentity(f.Credentials(u.Name))
		if err != nil || id.InboxPrefix() != auth.InboxOf(u.Key) || !strings.Contains(id.String(), string(u.Role)) {
			t.Errorf("%s: identity %v, %v", u.Name, id, err)
		}
	}
	key := f.User("alice").Key
	if err := f.Remove("alice"); err != nil || strings.Contains(read(t, filepath.Join(f.Dir(), "auth.conf")), key) {
		t.Errorf("remove: %v", err)
	}
	if _, err := os.Stat(f.Credentials("alice")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("credentials of a user who was removed: %v", err)
	}
}

func TestFolder_refuses(t *testing.T) {
	t.Parallel()
	f := create(t)
	for name, u := range map[string]auth.User{
		"there is such a user":           {Name: "alice", Role: auth.RoleViewer},
		"must be one of intake, sampler": {Name: "bob", Role: "owner"},
		"name":                           {Name: "a b", Role: auth.RoleViewer},
	} {
		err := f.Add(u)
		if mistake, ok := errors.AsType[*auth.InvalidError](err); !ok || !strings.Contains(mistake.Error(), name) {
			t.Errorf("%+v: %v; want a mistake: %s", u, err, name)
		}
	}
	errRemove := f.Remove("bob")
	_, errOpen := auth.Open(t.TempDir())
	_, errCreate := auth.Create(f.Dir(), "", nil)
	_, errOpenEmpty := auth.Open("")
	_, errCreateEmpty := auth.Create("", "", nil)
	for _, err := range []error{errRemove, errOpen, errCreate, errOpenEmpty, errCreateEmpty} {
		if _, ok := errors.AsType[*auth.InvalidError](err); !ok {
			t.Errorf("%v; want a mistake", err)
		}
	}
}

// What the error of a folder that cannot be opened says to do works: a folder is made where there is nothing, and one
// that has lost its users, which cannot be made again in its place, needs them back.
func TestOpen_NoUsers(t *testing.T) {
	t.Parallel()
	empty := t.TempDir()
	if _, err := auth.Open(empty); err == nil || !strings.Contains(err.Error(),
		"make one with: meander auth init "+empty) {
		t.Errorf("an empty folder: %v", err)
	}
	if _, err := auth.Create(empty, "127.0.0.1:4222", nil); err != nil {
		t.Error(err)
	}
	f := create(t)
	users := filepath.Join(f.Dir(), "users.json")
	text := read(t, users)
	if err := os.Remove(users); err != nil {
		t.Fatal(err)
	}
	if _, err := auth.Open(f.Dir()); err == nil || strings.Contains(err.Error(), "auth init "+f.Dir()) ||
		!strings.Contains(err.Error(), "it has no users.json. Put that file back") {
		t.Errorf("without users.json: %v", err)
	}
	if err := os.WriteFile(users, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if again, err := auth.Open(f.Dir()); err != nil || !slices.Equal(again.Names(), f.Names()) {
		t.Errorf("with users.json back: %v", err)
	}
}

// A new certificate has the hosts of the old one.
func TestFolder_Update(t *testing.T) {
	t.Parallel()
	f := create(t)
	if err := f.Update([]string{"more.example.org"}); err != nil {
		t.Fatal(err)
	}
	cert, err := f.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(read(t, f.CAFile())))
	for _, host := range []string{"localhost", "::1", "nats.example.org", "10.0.0.7", "more.example.org"} {
		if _, err := cert.Verify(x509.VerifyOptions{DNSName: host, Roots: roots, CurrentTime: time.Now()}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
}

// A folder of an older release is refused: a user who was limited to runs there would see all.
func TestOpen_Older(t *testing.T) {
	t.Parallel()
	for says, change := range map[string][2]string{
		`unknown field "runs"`:                    {`"role": "viewer",`, `"role": "viewer", "runs": ["a"],`},
		"account: missing; an older release made": {`"account": "meander",`, ""},
	} {
		f := create(t)
		users := filepath.Join(f.Dir(), "users.json")
		text := read(t, users)
		if !strings.Contains(text, change[0]) {
			t.Fatalf("no %s in %s", change[0], text)
		}
		if err := os.WriteFile(users, []byte(strings.Replace(text, change[0], change[1], 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := auth.Open(f.Dir()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; must say %s", err, says)
		}
	}
}

// Each role may do what it is for.
func TestRights(t *testing.T) {
	t.Parallel()
	rights := func(u auth.User) auth.Rights {
		r, err := u.Rights()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	may := func(r auth.Rights, subject string) bool {
		fits := func(f string) bool { return schemas.Matches(f, subject) }
		return r.Unlimited || slices.ContainsFunc(r.Publish, fits) && !slices.ContainsFunc(r.Deny, fits)
	}
	trainer := rights(auth.User{Role: auth.RoleTrainer})
	for subject, want := range map[string]bool{
		schemas.PromptSubject("a"): true, schemas.PolicySubject("lane", schemas.TenantMain): true,
		"$O.mdr-blobs.M.x": true,
		"$JS.API.CONSUMER.MSG.NEXT.MDR_TRAJECTORIES.reward": false, "$JS.API.STREAM.PURGE.MDR_STEPS": false,
	} {
		if may(trainer, subject) != want {
			t.Errorf("%s: a trainer %v", subject, !want)
		}
	}
	for _, d := range schemas.Durables() {
		r := rights(auth.User{Role: auth.Role(d.Service)})
		if !may(r, "$JS.API.CONSUMER.MSG.NEXT."+d.Stream+"."+d.Name) {
			t.Errorf("%s may not take its work from %s", d.Service, d.Name)
		}
	}
}

// The end of an error names the roles that have the right.
func TestIdentity(t *testing.T) {
	t.Parallel()
	f := create(t)
	identity := func(name string) auth.Identity {
		id, err := auth.ReadIdentity(f.Credentials(name))
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	want := "; the roles that may are advantage, trainer, admin"
	if got := identity("viewer").MissingRight(schemas.PromptSubject("a")); got != want {
		t.Errorf("%q; want %q", got, want)
	}
	for name, text := range map[string]string{
		"empty":  "",
		"public": "UCN3SBM6WPYNSWFSDNUQ7VSEAGDBXYRXGTY7ZSEFFXTRUYYDQ2Z34NOW",
	} {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := auth.ReadIdentity(file); err == nil ||
			!strings.Contains(err.Error(), "must have the seed of a user") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := auth.ReadIdentity(t.TempDir()); err == nil ||
		!strings.Contains(err.Error(), "not a file of credentials") {
		t.Errorf("a folder: %v", err)
	}
}
