"""Small files of HDF5, as h5py 3.16 has left them: closed, and after SIGKILL while they were open for writing.

``OLD`` is the format that it writes by default (superblock 0), ``NEW`` that of ``libver="latest"`` (superblock 3).
"""

from __future__ import annotations

import base64
import zlib


def _bytes(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


OLD_CLOSED = _bytes(
    "c-rgqaB<`1lHy_j0S*oZ76t(ZWbhvfBsfs{F!=;1%?PDCp!5nRm^dR?P68?}2sIyFT}Y6tD@gT!Gyt>5fCWNxFpPqc2s~UJ13+{Hln+a#Czw#xm7}Fc4+`"
    "yNWMGAu#R%g=QZgeWM1UEp4na$Rl?p1@L({4Qg9$f-$$zK<R-h<Io{5Qx5t5!E<}owElC}hz3pxf>JOumsyMS^uEFUT`kEYF0Fbak?_+SrZI6!Mz2LLj}FQo"
)
OLD_KILLED = _bytes("c-rgqaB<`1lHy_j0S*oZ76t(ZMg|1<4+RVyXnZJ0fYLBM9Z-4&6T>JN1*2dTjDk@x3I;X!U=L+DKqw9e0PZgo{r")
NEW_CLOSED = _bytes(
    "c-rgqaB<`1lHy|K;9!7(|4<+S6*7Q|bMDFc>+j(b#Kcg+B!sLG2Dq3Q7#SGYco={bWBF#7c^(W@0~2q&^9MTtXaS=L0|OHyBO^0Z4o-_OFbXQzGeBJLz+l47"
    "VDcX*$qIBGGZzQY<;;vwNd^g+!5bKc9M~Eo)XOjmM!_f;1*2dTkPklCLm3Vbio*c_Np30x"
)
NEW_KILLED = _bytes("c-rgqaB<`1lHy|K;9z8cg8xv!zyaYKK*b|MTXr#wf>AIEM!_f;1*2e?fDiUih69A+Z~y>FF%5k")
